/* What the fuzz programs share. A program defines LLVMFuzzerTestOneInput, LLVMFuzzerCustomMutator,
   fuzz_outcome and FUZZ_CORPUS, and includes this behind moe.h. With -DFUZZ_ENGINE (libFuzzer,
   AFL++) that is all; else there is a main, for any compiler with POSIX folders:
       fuzz_NAME                    runs the files of FUZZ_CORPUS, then 3000 mutations of them
       fuzz_NAME FILE-OR-FOLDER...  runs these
       fuzz_NAME -n COUNT [SEED]    runs COUNT mutations of FUZZ_CORPUS
   A file passes when nothing is wrong with how it was taken, and it was taken as its name says: its
   name begins with what fuzz_outcome says ("net-", "refused-", ...). What is wrong ends the
   program, after a line that says where. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

/* Seconds of a processor that one input may take. Thousands take one second: this is a guard
   against what never ends. */
#define FUZZ_SECONDS_MOST 60.0

static const char *fuzz_file_name = "";
static unsigned long fuzz_number; /* of the mutation at work */

#define want(good) ((good) ? (void)0 : fuzz_wrong(__LINE__, #good))

static void fuzz_wrong(int line, const char *what) {
    fprintf(stderr, "line %d: this does not hold: %s (input %s, mutation %lu)\n", line, what, fuzz_file_name,
            fuzz_number);
    abort();
}

static double fuzz_seconds(void) { return (double)clock() / (double)CLOCKS_PER_SEC; }

/* ---- random numbers: the same on every machine ---- */

static uint64_t fuzz_next(uint64_t *random) {
    uint64_t z = *random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static unsigned fuzz_below(uint64_t *random, size_t n) { return (unsigned)(fuzz_next(random) >> 33) % (unsigned)n; }

#endif

#if defined(FUZZ_CORPUS) && !defined(FUZZ_ENGINE)

#include <dirent.h>

enum { FUZZ_MOST_FILES = 1000, FUZZ_MOST_BYTES = 1 << 16 };

static char *fuzz_paths[FUZZ_MOST_FILES];
static size_t fuzz_n_paths;
static unsigned long fuzz_passed, fuzz_failed;
static uint64_t fuzz_random;

/* Stands for libFuzzer's own: bytes changed, put in, taken out, copied. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size) {
    size_t at = size > 0 ? fuzz_below(&fuzz_random, size) : 0, n = 1 + fuzz_below(&fuzz_random, 8);
    switch (fuzz_below(&fuzz_random, 4)) {
    case 0:
        if (size + n > max_size) return size;
        memmove(data + at + n, data + at, size - at);
        for (size += n; n > 0; n--) data[at + n - 1] = (uint8_t)fuzz_next(&fuzz_random);
        return size;
    case 1:
        if (n > size - at) n = size - at;
        memmove(data + at, data + at + n, size - at - n);
        return size - n;
    case 2:
        if (size > 0) data[at] = (uint8_t)fuzz_next(&fuzz_random);
        return size;
    default:
        if (n > size - at) n = size - at;
        if (size > 0) memmove(data + fuzz_below(&fuzz_random, size - n + 1), data + at, n);
        return size;
    }
}

static int fuzz_compare(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static void fuzz_add(const char *folder, const char *name) {
    char *path = (char *)malloc(strlen(folder) + strlen(name) + 2);
    want(path != NULL && fuzz_n_paths < FUZZ_MOST_FILES);
    sprintf(path, "%s%s%s", folder, *folder != '\0' ? "/" : "", name);
    fuzz_paths[fuzz_n_paths++] = path;
}

/* A file, or the files of a folder by name. */
static void fuzz_list(const char *path) {
    DIR *folder = opendir(path);
    struct dirent *entry;
    size_t first = fuzz_n_paths;
    if (folder == NULL) {
        fuzz_add("", path);
        return;
    }
    while ((entry = readdir(folder)) != NULL)
        if (entry->d_name[0] != '.') fuzz_add(path, entry->d_name);
    closedir(folder);
    qsort(fuzz_paths + first, fuzz_n_paths - first, sizeof *fuzz_paths, fuzz_compare);
}

/* 0 after a message. */
static int fuzz_read(const char *path, uint8_t *data, size_t *size) {
    FILE *f = fopen(path, "rb");
    *size = f != NULL ? fread(data, 1, FUZZ_MOST_BYTES, f) : 0;
    if (f == NULL || ferror(f) || fgetc(f) != EOF) {
        printf("failed: %s cannot be read, or is too long\n", path);
        if (f != NULL) fclose(f);
        return 0;
    }
    fclose(f);
    return 1;
}

/* A copy of its own size, so that sanitizers see a step beyond it. */
static void fuzz_run(const uint8_t *data, size_t size) {
    uint8_t *copy = (uint8_t *)malloc(size > 0 ? size : 1);
    want(copy != NULL);
    memcpy(copy, data, size);
    (void)LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

static void fuzz_run_file(const char *path, uint8_t *data) {
    const char *slash = strrchr(path, '/'), *name = slash != NULL ? slash + 1 : path, *outcome;
    size_t size;
    fuzz_file_name = path;
    if (!fuzz_read(path, data, &size)) {
        fuzz_failed++;
        return;
    }
    fuzz_run(data, size);
    outcome = fuzz_outcome(data, size);
    if (strncmp(name, outcome, strlen(outcome)) == 0 && name[strlen(outcome)] == '-') fuzz_passed++;
    else {
        fuzz_failed++;
        printf("failed: %s is '%s'\n", path, outcome);
    }
}

/* Each mutation begins with a file, or with what the last one made. */
static void fuzz_run_mutations(unsigned long count, unsigned long seed, uint8_t *data) {
    size_t size = 0;
    want(fuzz_n_paths > 0);
    fuzz_random = seed;
    for (fuzz_number = 1; fuzz_number <= count; fuzz_number++, fuzz_passed++) {
        if (fuzz_number == 1 || fuzz_below(&fuzz_random, 4) == 0) {
            fuzz_file_name = fuzz_paths[fuzz_below(&fuzz_random, fuzz_n_paths)];
            if (!fuzz_read(fuzz_file_name, data, &size)) exit(1);
        }
        size = LLVMFuzzerCustomMutator(data, size, FUZZ_MOST_BYTES / 4, (unsigned)fuzz_next(&fuzz_random));
        want(size <= FUZZ_MOST_BYTES / 4);
        fuzz_run(data, size);
    }
}

int main(int argc, char **argv) {
    static uint8_t data[FUZZ_MOST_BYTES];
    int mutate = argc > 1 && strcmp(argv[1], "-n") == 0;
    unsigned long count = mutate && argc > 2 ? strtoul(argv[2], NULL, 10) : 3000;
    unsigned long seed = mutate && argc > 3 ? strtoul(argv[3], NULL, 10) : 1;
    size_t i;
    int k;
    for (k = 1; k < argc && !mutate; k++) fuzz_list(argv[k]);
    if (argc < 2 || mutate) fuzz_list(FUZZ_CORPUS);
    for (i = 0; i < fuzz_n_paths && !mutate; i++) fuzz_run_file(fuzz_paths[i], data);
    if (argc < 2 || mutate) fuzz_run_mutations(count, seed, data);
    for (i = 0; i < fuzz_n_paths; i++) free(fuzz_paths[i]);
    printf("%lu passed, %lu failed\n", fuzz_passed, fuzz_failed);
    return fuzz_failed > 0;
}
#endif
