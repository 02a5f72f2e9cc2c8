#!/usr/bin/env python3
"""Uses the library as other languages do: by a shared library, plain structs, pointers and
numbers; no wrapper, no callback, no macro.

   python3 tests/port/bindings.py LIBRARY HEADER-AFTER-THE-PREPROCESSOR FOLDER
       tests/port/bindings.sh makes them; it compares what is printed
   python3 tests/port/bindings.py --nulls HEADER-AFTER-THE-PREPROCESSOR LIBRARY
       makes all calls with NULL
   python3 tests/port/bindings.py --rows HEADER-AFTER-THE-PREPROCESSOR
       prints the lists MOEI_OF_ and MOEI_STRUCTS of moe_layout.h
   python3 tests/port/bindings.py --offsets HEADER-AFTER-THE-PREPROCESSOR
       prints sizes and offsets by ctypes; --offsets-program: a C program that prints the compiler's

The declarations are read as they stand in the header, so every public struct and function
becomes one of ctypes. What cannot be said in ctypes (varargs, bit fields, long double, functions
that are macros or static) ends the test."""
import ctypes
import os
import re
import sys

BASES = {
    'void': None, 'char': ctypes.c_char, 'signed char': ctypes.c_byte, 'unsigned char': ctypes.c_ubyte,
    'int': ctypes.c_int,
    'unsigned': ctypes.c_uint, 'unsigned int': ctypes.c_uint, 'float': ctypes.c_float, 'double': ctypes.c_double,
    'size_t': ctypes.c_size_t,
    'int8_t': ctypes.c_int8, 'uint8_t': ctypes.c_uint8, 'int16_t': ctypes.c_int16, 'uint16_t': ctypes.c_uint16,
    'int32_t': ctypes.c_int32,
    'uint32_t': ctypes.c_uint32, 'int64_t': ctypes.c_int64, 'uint64_t': ctypes.c_uint64}


class Declarations:
    """All public names of a header: structs, functions, constants. Those that begin with moei_
    are private."""

    def __init__(self, text):
        self.types = dict(BASES)
        self.structs = {}  # name -> [member]
        self.functions = {}  # name -> (result, [argument])
        self.can_fail = set()  # those that return moe_status
        self.constants = {}
        self.function_types = set()
        for kind, piece in self.pieces(text[text.index('moe_real;') - 40:]):
            getattr(self, kind)(piece)

    @staticmethod
    def pieces(text):
        """The declarations at the top level, with what they are."""
        text = re.sub(r'extern "C" \{', ' ', re.sub(r'__attribute__\s*\(\([^)]*\)\)', ' ', text))
        text = re.sub(r'\s+', ' ', re.sub(r'^#.*$', ' ', text, flags=re.M))
        start = depth = 0
        for i, c in enumerate(text):
            depth += (c == '{') - (c == '}')
            if c == ';' and depth == 0:
                piece, start = text[start:i].strip(), i + 1
                if re.match(r'(typedef )?struct \w+ \{', piece):
                    yield 'struct', piece
                elif piece.startswith('enum {'):
                    yield 'enum', piece
                elif re.match(r'typedef [^{(]*\(', piece):
                    yield 'function_type', piece
                elif piece.startswith('typedef '):
                    yield 'typedef', piece
                elif re.match(r'extern .*\(', piece):
                    yield 'function', piece

    def enum(self, piece):
        value = -1
        for row in piece[piece.index('{') + 1:piece.rindex('}')].split(','):
            if not row.strip():
                continue
            name, _, text = row.partition('=')
            value = self.number(text) if text else value + 1
            self.constants[name.strip()] = value

    def number(self, text):
        text = text.strip().replace('sizeof(int)', str(ctypes.sizeof(ctypes.c_int)))
        condition = re.match(r'(.*)\?(.*):(.*)$', text)
        if condition:
            return self.number(condition.group(2) if self.number(condition.group(1)) else condition.group(3))
        # of our own header
        return eval(re.sub(r'\b(\d\w*?)[uUlL]+\b', r'\1', text), {'__builtins__': {}}, self.constants)

    def typedef(self, piece):
        words = piece.split()[1:]
        if words[0] == 'struct':
            self.types.setdefault(words[-1], type(words[-1], (ctypes.Structure,), {}))
        else:
            self.types[words[-1]] = self.types[' '.join(words[:-1])]

    def function_type(self, piece):
        self.function_types.add(re.search(r'(\w+) ?\(', piece).group(1))

    def struct(self, piece):
        name = re.match(r'(?:typedef )?struct (\w+)', piece).group(1)
        made = self.types.setdefault(name, type(name, (ctypes.Structure,), {}))
        fields = []
        for row in piece[piece.index('{') + 1:piece.rindex('}')].split(';'):
            if row.strip():
                fields += self.declared(row.strip())
        made._fields_ = fields
        if name.startswith('moe_'):
            self.structs[name] = [field for field, _ in fields]

    def declared(self, text):
        """The names of a declaration with their types: "const moe_real *a, b[3]"."""
        if '(' in text:  # a pointer to a function
            name = re.search(r'\(\* ?(\w+)\)', text)
            if not name:
                raise SystemExit('not understood: ' + text)
            return [(name.group(1), ctypes.c_void_p)]
        if ':' in text or '...' in text:
            raise SystemExit('no binding can say this: ' + text)
        text = re.sub(r'\b(const|struct|extern|volatile)\b', ' ', text)
        words = re.match(r'\s*((?:(?:unsigned|signed) )?\w+)\s*(.*)$', re.sub(r'\s+', ' ', text))
        base, rest = words.group(1), words.group(2)
        if base == 'unsigned char' or base in self.types or base in self.function_types:
            pass
        elif base.split()[0] == 'unsigned':  # "unsigned x"
            base, rest = 'unsigned', base.split(' ', 1)[1] + rest
        elif base not in self.types:
            self.types[base] = type(base, (ctypes.Structure,), {})  # known by pointers alone
        return [self.declarator(base, part.strip()) for part in rest.split(',')]

    def declarator(self, base, part):
        stars = part.count('*')
        name = re.search(r'\w+', part)
        dimensions = [self.number(d) for d in re.findall(r'\[([^\]]*)\]', part) if d.strip()]
        if base in self.function_types:
            made, stars = ctypes.c_void_p, stars - 1
        elif base == 'char' and stars:
            made, stars = ctypes.c_char_p, stars - 1
        elif base == 'void' and stars:
            made, stars = ctypes.c_void_p, stars - 1
        else:
            made = self.types[base]
        for _ in range(stars):
            made = ctypes.POINTER(made)
        for dimension in reversed(dimensions):
            made = made * dimension
        return (name.group(0) if name else '', made)

    def function(self, piece):
        found = re.match(r'extern (.*?)(\w+) ?\((.*)\)$', piece)
        result, name, rest = found.groups()
        depth, argument, arguments = 0, '', []
        for c in rest + ',':
            depth += (c == '(') - (c == ')')
            if c == ',' and depth == 0:
                arguments.append(argument.strip())
                argument = ''
            else:
                argument += c
        kinds = [] if arguments == ['void'] else [self.declared(a)[0] for a in arguments]
        if 'moe_status' in result.split():
            self.can_fail.add(name)
        if name.startswith('moe_'):
            self.functions[name] = (self.declared(result + ' result')[0][1], kinds)


class Library:
    """The functions by their plain names: lib.moe_dot, also where the symbol is moe_dot_f64."""

    def __init__(self, path, known):
        self.loaded = ctypes.CDLL(path)
        self.suffix = '_f64' if known.types['moe_real'] is ctypes.c_double else ''
        for name, (result, arguments) in known.functions.items():
            function = getattr(self.loaded, name)  # AttributeError: declared and not exported
            function.restype, function.argtypes = result, [kind for _, kind in arguments]
            setattr(self, name[:-len(self.suffix)] if self.suffix else name, function)


class Job:
    """What tests/port/bindings.cpp does, in the same order, printing the same lines."""

    def __init__(self, lib, known, folder):
        self.lib, self.t, self.c, self.folder = lib, known.types, known.constants, folder
        self.real = known.types['moe_real']
        self.error = self.t['moe_error']()

    def good(self, status, what):
        if status != 0:
            raise SystemExit('%s: %s: %s' % (what, self.lib.moe_status_text(status).decode(),
                                             self.error.message.decode()))

    def bits(self, what, numbers):
        """A checksum of the bits (FNV-1a) and the first number."""
        total = 14695981039346656037
        for byte in memoryview(numbers).cast('B'):
            total = (total ^ byte) * 1099511628211 % 2**64
        print('%s %d %016x %.6f' % (what, len(numbers), total, numbers[0]))

    def normal(self, n, seed):
        rng = self.t['moe_rng']()
        self.lib.moe_rng_seed(rng, seed)
        return (self.real * n)(*[self.lib.moe_rng_normal(rng) for _ in range(n)])

    def run(self):
        lib, t, c, real = self.lib, self.t, self.c, self.real
        byref, sizeof = ctypes.byref, ctypes.sizeof
        print('version', lib.moe_version().decode())
        # A layer: by the name of a preset, forward, backward, to a file and back.
        config = t['moe_layer_config']()
        self.good(lib.moe_layer_preset(b'mixtral', config, self.error), 'preset')
        config.router.d_model, config.d_ff, config.kernels = 16, 24, c['MOE_KERNELS_C']
        layer = t['moe_layer']()
        self.good(lib.moe_layer_create(layer, config, 1, 7, None, self.error), 'create')
        x, dy = self.normal(12 * 16, 1), self.normal(12 * 16, 2)
        y, dx = (real * (12 * 16))(), (real * (12 * 16))()
        size = ctypes.c_size_t()
        self.good(lib.moe_layer_work_size(layer, 12, 1, size), 'work size')
        work = ctypes.create_string_buffer(size.value)
        call, passed = t['moe_call'](), t['moe_layer_pass']()
        call.n_tokens, call.x, call.training = 12, x, 1
        self.good(lib.moe_layer_forward(layer, call, y, work, size, passed), 'forward')
        self.bits('forward', y)
        self.good(lib.moe_layer_backward(layer, dy, dx, None, passed), 'backward')
        self.bits('backward', dx)
        tensor = t['moe_tensor']()
        self.good(lib.moe_layer_find(layer, b'experts.up', tensor), 'find')
        shape = list(tensor.shape)[:tensor.n_dims]
        print('tensor', tensor.name.decode(), *shape)
        self.bits('gradient', (real * tensor.count).from_address(ctypes.addressof(tensor.gradient.contents)))
        self.bits('counts', (ctypes.c_size_t * 8).from_address(ctypes.addressof(passed.routing.counts.contents)))
        path = os.path.join(self.folder, 'layer.safetensors').encode()
        self.good(lib.moe_layer_save(layer, path, self.error), 'save')
        again = t['moe_layer']()
        self.good(lib.moe_layer_load(again, path, 0, 0, None, self.error), 'load')
        call.training = 0
        back = (real * (12 * 16))()
        self.good(lib.moe_layer_forward(again, call, back, work, size, passed), 'forward of the loaded layer')
        print('loaded', bytes(back) == bytes(y))
        lib.moe_layer_free(layer), lib.moe_layer_free(again)
        # A net that learns, to a file and back.
        net, copy, data, training = t['moe_net'](), t['moe_net'](), t['moe_data'](), t['moe_train_config']()
        x = self.normal(256 * 4, 3)
        labels = (ctypes.c_int32 * 256)(*[(x[4 * i] > 0) + 2 * (x[4 * i + 1] * x[4 * i + 2] > 0) for i in range(256)])
        small = t['moe_layer_config']()
        small.router.n_experts, small.d_ff = 4, 8
        self.good(lib.moe_net_init(net, 4, c['MOE_KERNELS_C'], None), 'init')
        lib.moe_net_linear(net, 8)
        lib.moe_net_activation(net, c['MOE_ACT_RELU'])
        lib.moe_net_mixture(net, small)
        lib.moe_net_linear(net, 4)
        self.good(lib.moe_net_build(net, 1, 5, self.error), 'build')
        data.n, data.x, data.labels = 256, x, labels
        training.epochs, training.rate, training.seed = 20, 0.01, 9
        self.good(lib.moe_fit(net, data, None, training, self.error), 'fit')
        seen = t['moe_evaluation']()
        self.good(lib.moe_evaluate(net, data, c['MOE_CRITERION_CROSS_ENTROPY'], seen, self.error), 'evaluate')
        print('learned %.5f %.4f' % (seen.loss, seen.accuracy))
        path = os.path.join(self.folder, 'net.safetensors').encode()
        self.good(lib.moe_net_save(net, path, self.error), 'save')
        self.good(lib.moe_net_load(copy, path, 0, c['MOE_KERNELS_C'], None, self.error), 'load')
        self.good(lib.moe_net_work_size(copy, 256, 0, size), 'work size')
        work = ctypes.create_string_buffer(size.value)
        call, ran = t['moe_call'](), t['moe_net_pass']()
        call.n_tokens, call.x = 256, x
        self.good(lib.moe_net_forward(copy, call, work, size, ran), 'forward of the net')
        self.bits('answers', (real * 1024).from_address(ctypes.addressof(ran.y.contents)))
        for i in range(copy.n_tensors):
            tensor = copy.tensors[i]
            self.bits(tensor.name.decode(), (real * tensor.count).from_address(ctypes.addressof(tensor.data.contents)))
        # Errors come back as a number and a sentence.
        small.router.d_model, small.router.top_k = 4, 9
        status = lib.moe_layer_check(small, None, self.error)
        print('refused', status, self.error.message.decode())
        print('missing', lib.moe_net_load(copy, os.path.join(self.folder, 'none').encode(), 0, 0, None, self.error))
        lib.moe_net_free(net), lib.moe_net_free(copy)


def layouts(lib, known):
    """What the library says of its structs, against what was read in the header and laid out by
    ctypes."""
    offset, size, seen, members = ctypes.c_size_t(), ctypes.c_size_t(), [], 0
    wrong = []
    while lib.moe_struct_names(len(seen)):
        words = lib.moe_struct_names(len(seen)).decode().split()
        seen.append(words[0])
        if known.structs.get(words[0]) != words[1:]:
            wrong.append('%s: the header has %s, the library %s' % (words[0], known.structs.get(words[0]), words[1:]))
            continue
        made = known.types[words[0]]
        for member in [None] + words[1:]:
            field = (0, ctypes.sizeof(made)) if member is None else (getattr(made, member).offset,
                                                                     getattr(made, member).size)
            status = lib.moe_struct_place(words[0].encode(), member.encode() if member else None, offset, size)
            members += member is not None
            if status != 0 or field != (offset.value, size.value):
                wrong.append('%s.%s: ctypes %s, the library %s' % (words[0], member, field, (offset.value, size.value)))
    wrong += ['not in the library: ' + name for name in known.structs if name not in seen]
    for name, member in ((b'moe_nothing', None), (b'moe_call', b'nothing'), (b'moe_call', b''), (b'moe_cal', None),
                         (b'', None), (None, None),
                         (b'moe_call', b'n_tokens x'), (b'moe_error code', None)):
        offset.value = size.value = 77
        if lib.moe_struct_place(name, member, offset, size) == 0 or (offset.value, size.value) != (77, 77):
            wrong.append('%s.%s was found' % (name, member))
    if wrong or len(seen) < 50 or members < 400:
        raise SystemExit('\n'.join(wrong) or 'only %d structs' % len(seen))
    print('# %d structs with %d members lie where ctypes puts them' % (len(seen), members))


# Calls that return moe_status and do not look at pointers, as the headers say: the packing of
# moe_kernels.h, and these.
UNCHECKED = re.compile(r'moe_(un)?pack|moe_(router|layer)_parameter$|moe_fields_apply$')


def nulls(path, known):
    """Every call that can fail is made with NULL for all pointers, and answers MOE_ERR_ARGUMENT;
    every call that frees does nothing. A child makes each, for a crash is what is looked for."""
    lib, wrong, made = Library(path, known), [], 0
    for name, (_, arguments) in known.functions.items():
        plain = name[:-4] if name.endswith('_f64') else name
        fails = name in known.can_fail
        if UNCHECKED.match(plain) or not (fails or plain.endswith('_free')):
            continue
        values = []
        for _, kind in arguments:
            pointer = kind in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(kind, ctypes._Pointer)
            values.append(None if pointer else kind(1))
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            answer = getattr(lib, plain)(*values)
            os._exit(1 if fails and answer != known.constants['MOE_ERR_ARGUMENT'] else 0)
        made += 1
        status = os.waitpid(child, 0)[1]
        if status:
            wrong.append('%s with NULL: %s' % (plain, 'crashes' if os.WIFSIGNALED(status)
                                               else 'does not answer MOE_ERR_ARGUMENT'))
    if wrong or made < 100:
        raise SystemExit('\n'.join(wrong) or 'only %d calls' % made)
    print('# %d calls with NULL are refused' % made)


def wrapped(line, words):
    """A macro of these words, in lines of at most 120 columns."""
    lines = []
    for word in words:
        if len(line) + 1 + len(word) > 118:
            lines.append(line + ' \\')
            line = '   '
        line += ' ' + word
    return '\n'.join(lines + [line])


def owners(known):
    """The header that a struct is of: '' for the core, else the name of an extra."""
    owner = {name: '' for name in known.structs}
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'examples', 'extras')
    for file in sorted(os.listdir(folder)):
        with open(os.path.join(folder, file), encoding='utf-8') as header:
            for name in re.findall(r'^typedef struct (moe_\w+) \{', header.read(), flags=re.M):
                if name in owner:
                    owner[name] = re.match(r'moe_(\w+)\.h', file).group(1).upper()
    return owner


def rows(known):
    owner = owners(known)
    for name, members in known.structs.items():
        print(wrapped('#define MOEI_OF_%s(M, s)' % name, ['M(s, %s)' % member for member in members]))
    extras = sorted(set(owner.values()) - {''})
    print(wrapped('#define MOEI_STRUCTS_CORE(S)', ['S(%s)' % name for name in known.structs if not owner[name]]))
    for extra in extras:
        print('#ifdef MOE_%s_H' % extra)
        print(wrapped('#define MOEI_STRUCTS_%s(S)' % extra,
                      ['S(%s)' % name for name in known.structs if owner[name] == extra]))
        print('#else\n#define MOEI_STRUCTS_%s(S)\n#endif' % extra)
    print(wrapped('#define MOEI_STRUCTS(S)', ['MOEI_STRUCTS_%s(S)' % extra for extra in ['CORE'] + extras]))


def offsets_program(known):
    """A C program that prints sizes and offsets as the compiler has them."""
    print('#include "tests/all.h"\n#include <stdio.h>\nint main(void) {')
    for name, members in known.structs.items():
        print('    printf("%s %%d\\n", (int)sizeof(%s));' % (name, name))
        for member in members:
            print('    printf("%s.%s %%d %%d\\n", (int)offsetof(%s, %s), (int)sizeof(((%s *)0)->%s));' % (name, member,
                name, member, name, member))
    print('    return 0;\n}')


def offsets_of_ctypes(known):
    for name, members in known.structs.items():
        made = known.types[name]
        print(name, ctypes.sizeof(made))
        for member in members:
            print('%s.%s %d %d' % (name, member, getattr(made, member).offset, getattr(made, member).size))


def main():
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    with open(sys.argv[2], encoding='utf-8') as file:
        known = Declarations(file.read())
    if sys.argv[1] == '--rows':
        return rows(known)
    if sys.argv[1] == '--offsets-program':
        return offsets_program(known)
    if sys.argv[1] == '--nulls':
        return nulls(sys.argv[3], known)
    if sys.argv[1] == '--offsets':
        return offsets_of_ctypes(known)
    lib = Library(sys.argv[1], known)
    print('# %d functions, %d structs, %d constants' % (len(known.functions), len(known.structs), len(known.constants)))
    layouts(lib, known)
    Job(lib, known, sys.argv[3]).run()
    return None


main()
