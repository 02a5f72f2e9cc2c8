/* Shared by the examples that write C: the name of a model, made of its file's, and whether C or
   its library has that name for something else, so that the program would not compile. */
#ifndef C_NAMES_H
#define C_NAMES_H

#include <ctype.h>
#include <string.h>

enum { C_NAME_SIZE = 40 /* the longest name of a model */ };

/* The name of a file without folder and extension, as a C identifier. */
static inline void c_name_of_file(const char *file, char name[C_NAME_SIZE + 1]) {
    const char *slash = strrchr(file, '/');
    size_t n = 0;
    for (file = slash != NULL ? slash + 1 : file; *file != '\0' && *file != '.' && n < C_NAME_SIZE; file++)
        name[n++] = (char)(isalnum((unsigned char)*file) ? *file : '_');
    name[n] = '\0';
    if (isalpha((unsigned char)*name)) return;
    *name = 'm';
    name[n > 0 ? n : 1] = '\0';
}

/* Whether the n characters at name are a word of a list that begins and ends with a space. */
static inline int c_names_have(const char *list, const char *name, size_t n) {
    for (const char *at = list; n > 0 && (at = strchr(at, *name)) != NULL; at++)
        if (at[-1] == ' ' && strncmp(at, name, n) == 0 && at[n] == ' ') return 1;
    return 0;
}

/* Whether a name is a keyword of C or C++, main, one of C99's library, one that C libraries add by
   default to ctype.h, math.h, stdio.h, stdlib.h and string.h, or begins as those of moe.h do. */
static inline int is_name_of_c(const char *name) {
    static const char keywords[] =
        " auto break case char const continue default do double else enum extern float for goto if inline int long "
        "register restrict return short signed sizeof static struct switch typedef union unsigned void volatile while "
        "alignas alignof and and_eq asm bitand bitor bool catch char8_t char16_t char32_t class co_await co_return "
        "co_yield compl concept const_cast consteval constexpr constinit decltype delete dynamic_cast explicit export "
        "false friend mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public "
        "reinterpret_cast requires static_assert static_cast template this thread_local throw true try typeid "
        "typename typeof typeof_unqual using virtual wchar_t xor xor_eq ";
    /* also with f and l at the end */
    static const char of_math[] =
        " acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh drem erf erfc exp exp2 expm1 fabs fdim "
        "finite floor fma fmax fmin fmod frexp gamma hypot ilogb isinf isnan j0 j1 jn ldexp lgamma llrint llround log "
        "log10 log1p log2 logb lrint lround modf nan nearbyint nextafter nexttoward pow remainder remquo rint round "
        "scalb scalbln scalbn significand sin sinh sqrt tan tanh tgamma trunc y0 y1 yn ";
    /* also with _l, _r and _unlocked at the end */
    static const char of_c[] =
        " main abort abs asctime atexit atof atoi atol atoll bsearch calloc clearerr clock ctime difftime div exit "
        "fclose feof ferror fflush fgetc fgetpos fgets fopen fprintf fputc fputs fread free freopen fscanf fseek "
        "fsetpos ftell fwrite getc getchar getenv gets gmtime isalnum isalpha isblank iscntrl isdigit isgraph islower "
        "isprint ispunct isspace isupper isxdigit labs ldiv llabs lldiv localtime malloc mblen mbstowcs mbtowc memchr "
        "memcmp memcpy memmove memset mktime perror printf putc putchar puts qsort raise rand realloc remove rename "
        "rewind scanf setbuf setlocale setvbuf signal snprintf sprintf srand sscanf strcat strchr strcmp strcoll "
        "strcpy strcspn strerror strftime strlen strncat strncmp strncpy strpbrk strrchr strspn strstr strtod strtof "
        "strtok strtol strtold strtoll strtoul strtoull strxfrm system time tmpfile tmpnam tolower toupper ungetc "
        "vfprintf vfscanf vprintf vscanf vsnprintf vsprintf vsscanf wcstombs wctomb assert errno fpclassify isfinite "
        "isgreater isgreaterequal isless islessequal islessgreater isnormal isunordered offsetof setjmp longjmp "
        "signbit stdin stdout stderr va_arg va_copy va_end va_start va_list size_t ptrdiff_t fpos_t div_t ldiv_t "
        "lldiv_t float_t double_t int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t intptr_t uintptr_t "
        "intmax_t uintmax_t NULL FILE EOF BUFSIZ RAND_MAX HUGE_VAL INFINITY NAN EXIT_SUCCESS EXIT_FAILURE ";
    static const char of_others[] =
        " a64l aligned_alloc alloca arc4random arc4random_buf arc4random_uniform at_quick_exit bcmp bcopy bzero "
        "clearenv ctermid dprintf drand48 ecvt erand48 explicit_bzero fcvt fdopen ffs ffsl ffsll fileno flockfile "
        "fmemopen fseeko ftello ftrylockfile funlockfile gcvt getdelim getline getloadavg getsubopt getw index "
        "initstate isascii jrand48 l64a lcong48 lgammaf_r lgammal_r linux lrand48 memccpy mkdtemp mkstemp mkstemps "
        "mktemp mrand48 nrand48 on_exit open_memstream pclose popen posix_memalign pselect putenv putw qecvt qfcvt "
        "qgcvt quick_exit random reallocarray realpath renameat rindex rpmatch seed48 select setbuffer setenv "
        "setlinebuf setstate signgam srand48 srandom stpcpy stpncpy strcasecmp strdup strncasecmp strndup strnlen "
        "strsep strsignal strtoq strtouq tempnam toascii uint ulong unix unsetenv ushort valloc vdprintf ";
    static const char *const endings[] = {"", "_l", "_r", "_unlocked"};
    const size_t n = strlen(name);
    if ((name[0] | 32) == 'm' && (name[1] | 32) == 'o' && (name[2] | 32) == 'e') {
        const char *behind = name + ((name[3] | 32) == 'i' ? 4 : 3);
        if (*behind == '\0' || *behind == '_') return 1;
    }
    if (c_names_have(keywords, name, n) || c_names_have(of_math, name, n)) return 1;
    if (n > 1 && strchr("fl", name[n - 1]) != NULL && c_names_have(of_math, name, n - 1)) return 1;
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        const size_t end = strlen(endings[i]);
        if (n <= end || strcmp(name + n - end, endings[i]) != 0) continue;
        if (c_names_have(of_c, name, n - end) || c_names_have(of_others, name, n - end) ||
            (end > 0 && c_names_have(of_math, name, n - end)))
            return 1;
    }
    return 0;
}

#endif
