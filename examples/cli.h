/* Shared by the examples' command lines: where the repository's files are, and whether an output
   file can be written. */
#ifndef EXAMPLES_CLI_H
#define EXAMPLES_CLI_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifndef _WIN32
#include <sys/stat.h>
#endif

/* Exit status for an invalid command line. */
enum { EXIT_USAGE = 2 };

/* Whether a message of the library, "cannot open FILE: reason", names the file itself. */
static inline int is_named(const char *file, const char *why) {
    const size_t n = strlen(file);
    for (const char *at = strncmp(why, "cannot ", 7) == 0 ? why + 7 : ""; *at != '\0'; at++)
        if (strncmp(at, file, n) == 0 && strncmp(at + n, ": ", 2) == 0) return 1;
    return 0;
}

/* The command line of a program without options: the exit status; -1: the program is to run. */
static inline int only_help(int count, char **words, const char *program, const char *about) {
    if (count < 2) return -1;
    if (strcmp(words[1], "-h") == 0 || strcmp(words[1], "--help") == 0)
        return printf("%s   %s\n", program, about) < 0 || fflush(stdout) != 0;
    fprintf(stderr, "%s: %s: there are no options or arguments but -h\n", program, words[1]);
    return EXIT_USAGE;
}

/* The path of a file in examples/. sh examples/run passes that folder in MOE_EXAMPLES, because
   programs run in the user's folder. */
static inline const char *example_file(const char *name) {
    static char paths[4][1024];
    static int next;
    char *path = paths[next++ % 4];
    const char *folder = getenv("MOE_EXAMPLES");
    if (folder == NULL || strlen(folder) + strlen(name) + 2 > sizeof paths[0]) folder = "examples";
    sprintf(path, "%s/%s", folder, name);
    return path;
}

/* The three headers, the default text of the examples. */
static inline const char *const *example_headers(void) {
    static const char *paths[3];
    paths[0] = example_file("../moe.h");
    paths[1] = example_file("../moe_routers.h");
    paths[2] = example_file("../moe_kernels.h");
    return paths;
}

static inline int file_is_there(const char *path) {
    FILE *f = fopen(path, "rb");
    if (f != NULL) fclose(f);
    return f != NULL;
}

/* Whether both names are there and lead to one file, by another path or a link too: what a program
   reads or has written, it does not write. */
static inline int is_same_file(const char *a, const char *b) {
    if (a == NULL || b == NULL) return 0;
    while (strncmp(a, "./", 2) == 0) a += 2;
    while (strncmp(b, "./", 2) == 0) b += 2;
    if (strcmp(a, b) == 0) return strcmp(a, "-") != 0;
#ifndef _WIN32
    struct stat of_a, of_b;
    if (stat(a, &of_a) == 0 && stat(b, &of_b) == 0 && S_ISREG(of_a.st_mode))
        return of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
#endif
    return 0;
}

/* The first of n outputs that is an input too, or an output before it; NULL: there is none. What is
   NULL is left out. */
static inline const char *written_twice(const char *const *outputs, int n, const char *const *inputs, int n_inputs) {
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < i; k++)
            if (is_same_file(outputs[i], outputs[k])) return outputs[i];
        for (int k = 0; k < n_inputs; k++)
            if (is_same_file(outputs[i], inputs[k])) return outputs[i];
    }
    return NULL;
}

/* Whether a header of this name would take the place of one of moe's, which it includes. */
static inline int is_header_of_moe(const char *file) {
    static const char *const names[] = {"moe.h", "moe_routers.h", "moe_kernels.h"};
    const char *slash = strrchr(file, '/');
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(slash != NULL ? slash + 1 : file, names[i]) == 0) return 1;
    return 0;
}

#define WRITTEN_TWICE "would replace what is read, or what else is written: name another file"

/* NULL if path can be written, else the reason. Called before long computations; leaves no file
   behind. What is not there is tried with another name beside it, because it may be a link that
   leads nowhere yet. */
static inline const char *not_writable(const char *path) {
    char beside[2048];
    const char *tried = path;
    int there;
    FILE *f;
#ifndef _WIN32
    struct stat old; /* the library replaces files only, and to open a pipe would wait for its other end */
    if (stat(path, &old) == 0 && !S_ISREG(old.st_mode) && !S_ISDIR(old.st_mode)) return "not a regular file";
#endif
    there = file_is_there(path);
    if (*path == '\0' || strlen(path) + sizeof ".try" > sizeof beside) return *path == '\0' ? "no name" : "too long";
    if (!there) {
        sprintf(beside, "%s.try", path);
        tried = beside;
        there = file_is_there(beside);
    }
    f = fopen(tried, "ab");
    if (f == NULL) return strerror(errno);
    fclose(f);
    if (!there) remove(tried);
    return NULL;
}

#endif
