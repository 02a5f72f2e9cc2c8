/* Published mixture layers: files that tests/published.py made (it needs python3; without it that part is skipped), and every way in which a file can be wrong.
   cc -std=c99 -O2 -I. tests/published.c -o published -lm && ./published [SEED]
   Runs in a folder from which tests/published.py can be reached, and writes into a folder published-test there, which it removes. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "moe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned long passed, failed, skipped;

static int check(int good, const char *what, const char *detail, int line) {
    if (good) passed++;
    else {
        failed++;
        if (failed < 60) printf("line %d: %s%s%s\n", line, what, detail[0] != '\0' ? ": " : "", detail);
    }
    return good;
}

#define CHECK(condition) check((condition) != 0, #condition, "", __LINE__)
#define CHECK_SAYS(condition, says) check((condition) != 0, #condition, says, __LINE__)

static void *grab(size_t n) {
    void *p = malloc(n > 0 ? n : 1);
    if (p == NULL) exit(2);
    return p;
}

/* ---- files of another program ------------------------------------------------------------------------------------------------------------ */

#define FOLDER "published-test"

/* The largest difference over the largest expected number; -1: the call failed. */
static double distance(const moe_layer *layer, size_t n, size_t d, const double *x, const double *expected, moe_status *status) {
    moe_real *input = (moe_real *)grab(n * d * sizeof *input), *output = (moe_real *)grab(n * d * sizeof *output);
    moe_call call;
    size_t bytes = 0, i;
    double most = 0, size = 0;
    void *work;
    memset(&call, 0, sizeof call);
    for (i = 0; i < n * d; i++) input[i] = (moe_real)x[i];
    call.n_tokens = n, call.x = input;
    *status = moe_layer_work_size(layer, n, 0, &bytes);
    work = grab(bytes);
    if (*status == MOE_OK) *status = moe_layer_forward(layer, &call, output, work, bytes, NULL);
    for (i = 0; i < n * d && *status == MOE_OK; i++) {
        if (fabs((double)output[i] - expected[i]) > most) most = fabs((double)output[i] - expected[i]);
        if (fabs(expected[i]) > size) size = fabs(expected[i]);
        if (!moe_is_finite(output[i])) most = HUGE_VAL;
    }
    free(input), free(output), free(work);
    return *status == MOE_OK && size > 0 ? most / size : -1;
}

/* Little-endian doubles. */
static int read_doubles(const char *path, double *to, size_t n) {
    FILE *f = fopen(path, "rb");
    unsigned char b[8];
    size_t i;
    int k;
    for (i = 0; f != NULL && i < n; i++) {
        uint64_t bits = 0;
        if (fread(b, 1, 8, f) != 8) break;
        for (k = 0; k < 8; k++) bits |= (uint64_t)b[k] << 8 * k;
        memcpy(&to[i], &bits, 8);
    }
    if (f != NULL) fclose(f);
    return i == n;
}

static const char *const dtype_names[] = {"F64", "F32", "F16", "BF16"};

/* One line of cases.txt. */
static void run_case(const char *line, double *worst) {
    char name[64], path[512], prefix[128], preset[32], original[768], family[32], dtype[16], file[600], says[400];
    unsigned long n, d;
    moe_layer layer;
    moe_error error;
    moe_status status;
    double *xy, far;
    int i;
    if (sscanf(line, "%63s %511s %127s %31s %lu %lu %767s %31s %15s", name, path, prefix, preset, &n, &d, original, family, dtype) != 9) {
        CHECK(!"a line of cases.txt is malformed");
        return;
    }
    error.message[0] = '\0';
    memset(&layer, 0, sizeof layer);
    status = moe_load_layer(&layer, path, prefix, strcmp(preset, "-") != 0 ? preset : NULL, NULL, &error);
    sprintf(says, "%s (%s, %s): %.250s", name, family, dtype, error.message);
    if (!CHECK_SAYS(status == MOE_OK, says)) return;
    CHECK_SAYS(layer.config.router.d_model == (int)d && layer.gradients[MOE_EXPERTS_GATE] == NULL, says);
    xy = (double *)grab(2 * n * d * sizeof *xy);
    sprintf(file, FOLDER "/%s.xy", name);
    CHECK_SAYS(read_doubles(file, xy, 2 * n * d), file);
    far = distance(&layer, n, d, xy, xy + n * d, &status);
    sprintf(says, "%s (%s, %s): %g off", name, family, dtype, far);
    CHECK_SAYS(far >= 0 && far <= 1e-5, says);
    if (far > *worst) *worst = far;
    free(xy);
    if (strcmp(original, "-") != 0) {
        for (i = 0; i < 4 && strcmp(dtype, dtype_names[i]) != 0;) i++;
        sprintf(file, FOLDER "/%s.out.safetensors", name);
        status = moe_save_published(&layer, file, strrchr(original, '=') + 1, family, i, &error);
        sprintf(says, "%s (%s, %s): %.250s", name, family, dtype, error.message);
        CHECK_SAYS(status == MOE_OK, says);
    }
    moe_layer_free(&layer);
}

static int python(const char *what, const char *arguments) {
    char command[200];
    sprintf(command, "python3 tests/published.py %s %s %s", what, FOLDER, arguments);
    fflush(stdout);
    return system(command);
}

static void of_another_program(const char *seed) {
    char line[2048];
    double worst = 0;
    unsigned long n = 0;
    FILE *cases;
    if (system("python3 -c 0 2>/dev/null") != 0) {
        printf("skip: python3 is not there\n");
        if (getenv("REQUIRE_TOOLS") != NULL && strcmp(getenv("REQUIRE_TOOLS"), "1") == 0) failed++;
        else skipped++;
        return;
    }
    if (!CHECK(python("make", seed) == 0)) return;
    cases = fopen(FOLDER "/cases.txt", "r");
    while (cases != NULL && fgets(line, sizeof line, cases) != NULL) run_case(line, &worst), n++;
    if (cases != NULL) fclose(cases);
    CHECK(n > 100);
    CHECK(python("check", "") == 0);
    printf("note: %lu models of another program: at most %.2g off\n", n, worst);
    CHECK(system("rm -rf " FOLDER) == 0);
}

int main(int argc, char **argv) {
    of_another_program(argc > 1 ? argv[1] : "1");
    printf("%lu passed, %lu failed", passed, failed);
    printf(skipped > 0 ? ", %lu skipped\n" : "\n", skipped);
    return failed > 0;
}
