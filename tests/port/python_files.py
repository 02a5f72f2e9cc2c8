#!/usr/bin/env python3
"""Reads the files that tests/port/python_files.cpp has written, by numpy and json alone, and
compares every tensor's bits, the metadata and the configuration with what that program printed.

   python3 tests/port/python_files.py FOLDER LIST [f64]         (tests/port/bindings.sh runs it)

Written from the format's description (an 8-byte length, JSON, data;
https://huggingface.co/docs/safetensors), not from moe.h. Where the package safetensors is
installed it reads the files as well. The last line is "N passed, N failed"."""
import json
import os
import sys

import numpy

TYPES = {'F64': '<f8', 'F32': '<f4', 'F16': '<f2', 'I64': '<i8', 'I32': '<i4', 'I16': '<i2', 'I8': 'i1', 'U8': 'u1',
         'BOOL': 'u1'}


def no_twins(pairs):
    keys = [key for key, _ in pairs]
    if len(keys) != len(set(keys)):
        raise ValueError('a name stands twice')
    return dict(pairs)


def read(path):
    """The metadata and the tensors of a file, in its order."""
    with open(path, 'rb') as file:
        raw = file.read()
    length = int(numpy.frombuffer(raw, '<u8', 1)[0])
    header = json.loads(raw[8:8 + length].decode('utf-8'), object_pairs_hook=no_twins)
    metadata = header.pop('__metadata__', {})
    if any(not isinstance(text, str) for text in metadata.values()):
        raise ValueError('metadata that is no text')
    if (8 + length) % 8:
        raise ValueError('data does not start at a multiple of 8')
    tensors, at = {}, 0
    for name, entry in header.items():
        begin, end = entry['data_offsets']
        kind = numpy.dtype(TYPES[entry['dtype']])
        count = int(numpy.prod(entry['shape'], dtype=object)) if entry['shape'] else 1
        if begin != at or end - begin != count * kind.itemsize:
            raise ValueError('%r: wrong place' % name)
        at = end
        tensors[name] = numpy.zeros(entry['shape'], kind)
        if count:
            tensors[name] = numpy.frombuffer(raw, kind, count, 8 + length + begin).reshape(entry['shape'])
    if 8 + length + at != len(raw):
        raise ValueError('the data ends elsewhere')
    return metadata, tensors


def text_of(word):
    return '' if word == '-' else bytes.fromhex(word).decode('utf-8')


class Said:
    """What the program printed of one file."""

    def __init__(self):
        self.tensors, self.metadata, self.fields, self.modules = [], {}, {}, []

    def line(self, words):
        if words[0] == 'tensor':
            rank = int(words[2])
            self.tensors.append((text_of(words[1]), [int(d) for d in words[3:3 + rank]],
                                 '' if words[3 + rank] == '-' else words[3 + rank]))
        elif words[0] == 'metadata':
            self.metadata[text_of(words[1])] = text_of(words[2])
        elif words[0] == 'field':
            self.fields[words[1]] = words[2]
        elif words[0] == 'module':
            self.modules.append(words[1])
        else:
            raise ValueError(' '.join(words))


class Report:
    passed = failed = 0

    def check(self, good, what):
        self.passed += bool(good)
        self.failed += not good
        if not good:
            print('failed: ' + what)


def same_value(text, value, real):
    """A field as text and as JSON: numbers by the value that they have in the type of the build."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return real(text) == real(value)
    return text == value


def compare(report, name, said, metadata, tensors, real):
    report.check([t[0] for t in said.tensors] == list(tensors),
                 '%s: names %s, printed %s' % (name, list(tensors), [t[0] for t in said.tensors]))
    for title, shape, bits in said.tensors:
        found = tensors.get(title)
        report.check(found is not None and list(found.shape) == shape
                     and found.dtype == numpy.dtype(real).newbyteorder('<'),
                     '%s: %r has shape %s' % (name, title, shape))
        report.check(found is not None and found.tobytes().hex() == bits, '%s: bits of %r' % (name, title))
    if said.metadata:
        report.check(metadata == said.metadata, '%s: metadata %r, printed %r' % (name, metadata, said.metadata))
    if said.fields:
        config = json.loads(metadata['moe'], object_pairs_hook=no_twins)
        report.check(config['format'] == 2 and set(config['layer']) == set(said.fields),
                     '%s: fields %s, printed %s' % (name, sorted(config['layer']), sorted(said.fields)))
        for field, text in said.fields.items():
            report.check(field in config['layer'] and same_value(text, config['layer'][field], real),
                         '%s: %s is %s, printed %s' % (name, field, config['layer'].get(field), text))
    if said.modules:
        net = json.loads(metadata['moe'], object_pairs_hook=no_twins)['net']
        report.check([m['module'] for m in net['modules']] == said.modules, '%s: modules' % name)
        report.check(net['d_in'] == 3 and net['modules'][3]['n_experts'] == 3 and net['modules'][3]['d_ff'] == 5,
                     '%s: sizes of modules' % name)


def read_by_package(report, path, tensors):
    try:
        from safetensors.numpy import load_file
    except ImportError:
        return
    found = load_file(path)
    report.check(set(found) == set(tensors) and all(found[n].tobytes() == t.tobytes() and found[n].shape == t.shape
                                                    for n, t in tensors.items()),
                 path + ': read by the package safetensors')


def main():
    folder, list_path = sys.argv[1:3]
    real = numpy.float64 if sys.argv[3:] == ['f64'] else numpy.float32
    files, said, report = {}, None, Report()
    with open(list_path, encoding='ascii') as lines:
        for line in lines:
            words = line.split()
            if words[0] == 'file':
                said = files.setdefault(words[1], Said())
            else:
                said.line(words)
    for name, printed in files.items():
        try:
            metadata, tensors = read(os.path.join(folder, name))
        except (ValueError, KeyError, UnicodeDecodeError) as problem:
            report.check(False, '%s cannot be read: %s' % (name, problem))
            continue
        compare(report, name, printed, metadata, tensors, real)
        read_by_package(report, os.path.join(folder, name), tensors)
    report.check(len(files) == 6 and all(f.tensors for f in files.values()), 'six files with tensors')
    print('%d passed, %d failed' % (report.passed, report.failed))
    return report.failed > 0


sys.exit(main())
