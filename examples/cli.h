/* Shared by the examples' command lines: where the repository's files are, and whether an output
   file can be written. */
#ifndef EXAMPLES_CLI_H
#define EXAMPLES_CLI_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Exit status for an invalid command line. */
enum { EXIT_USAGE = 2 };

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

/* Whether both names are there and equal: what a program reads, it does not write. */
static inline int is_same_name(const char *a, const char *b) { return a != NULL && b != NULL && strcmp(a, b) == 0; }

/* NULL if path can be written, else the reason. Called before long computations; leaves no file
   behind. What is not there is tried with another name beside it, because it may be a link that
   leads nowhere yet. */
static inline const char *not_writable(const char *path) {
    char beside[2048];
    const char *tried = path;
    int there = file_is_there(path);
    FILE *f;
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
