/* saved_by_0_1.c - files of version 0.1.0 load, and compute what they computed there.

     cc -std=c99 -O1 -I. tests/golden/saved_by_0_1.c -o saved -lm && ./saved

   tests/golden/saved_by_0_1 holds a layer (deepseek_v3, 8 features), a language model and the
   checkpoint of a trainer after three steps, as revision b43e510 saved them, and answers.txt: the
   layer's output for four tokens, the model's logits for eight, the loss of the fifth step.
   Computed by gcc 12 on x86-64 with the plain C kernels; the bits are compared there, elsewhere
   1e-5. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../../moe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FOLDER "tests/golden/saved_by_0_1/"

enum { TOKENS = 4, D = 8, IDS = 8, CLASSES = 11, SAMPLES = 32 };

static long passed, failed;
static double answers[TOKENS * D + IDS * CLASSES + 1];

static void check(int good, const char *what) {
    if (good) passed++;
    else failed++;
    if (!good) printf("tests/golden/saved_by_0_1.c: %s\n", what);
}

static int near(double got, double wanted) {
#if defined(__x86_64__) && !defined(__FMA__)
    if (sizeof(moe_real) == sizeof(float)) return got == wanted;
#endif
    return fabs(got - wanted) <= 1e-5 * (1 + fabs(wanted));
}

static int all_near(const moe_real *got, const double *wanted, size_t n) {
    size_t i;
    for (i = 0; i < n && near((double)got[i], wanted[i]); i++) continue;
    return i == n;
}

static int read_answers(void) {
    FILE *f = fopen(FOLDER "answers.txt", "r");
    size_t n = 0;
    if (f == NULL) return 0;
    while (n < sizeof answers / sizeof *answers && fscanf(f, "%la", &answers[n]) == 1) n++;
    fclose(f);
    return n == sizeof answers / sizeof *answers;
}

static void layer_file(void) {
    moe_layer layer;
    moe_call call;
    moe_rng rng = {9};
    moe_error error;
    moe_real x[TOKENS * D], y[TOKENS * D];
    size_t bytes, i;
    void *work;
    memset(&call, 0, sizeof call);
    check(moe_layer_load(&layer, FOLDER "layer.safetensors", 0, MOE_KERNELS_AUTO, NULL, &error) == MOE_OK,
          "the layer loads");
    layer.kernels = moe_kernels_select(MOE_KERNELS_C);
    for (i = 0; i < TOKENS * D; i++) x[i] = moe_rng_normal(&rng);
    call.n_tokens = TOKENS;
    call.x = x;
    check(moe_layer_work_size(&layer, TOKENS, 0, &bytes) == MOE_OK, "the layer's workspace");
    work = malloc(bytes);
    check(work != NULL && moe_layer_forward(&layer, &call, y, work, bytes, NULL) == MOE_OK, "the layer's forward pass");
    check(all_near(y, answers, TOKENS * D), "the layer's output");
    free(work);
    moe_layer_free(&layer);
}

static void fill(int32_t *ids, int32_t *labels) {
    int32_t i;
    for (i = 0; i < SAMPLES; i++) {
        ids[i] = i * i % CLASSES;
        labels[i] = (i + 1) * (i + 1) % CLASSES;
    }
}

static void model_file(void) {
    int32_t ids[SAMPLES], labels[SAMPLES];
    moe_net net;
    moe_net_pass pass;
    moe_call call;
    moe_error error;
    size_t bytes;
    void *work;
    fill(ids, labels);
    memset(&call, 0, sizeof call);
    check(moe_net_load(&net, FOLDER "net.safetensors", 0, MOE_KERNELS_C, NULL, &error) == MOE_OK, "the model loads");
    call.n_tokens = IDS;
    call.token_ids = ids;
    check(moe_net_work_size(&net, IDS, 0, &bytes) == MOE_OK, "the model's workspace");
    work = malloc(bytes);
    check(work != NULL && moe_net_forward(&net, &call, work, bytes, &pass) == MOE_OK, "the model's forward pass");
    check(all_near(pass.y, answers + TOKENS * D, IDS * CLASSES), "the model's logits");
    free(work);
    moe_net_free(&net);
}

/* The weights of the checkpoint, its moments, schedule and router state: the fourth and fifth step
   are those of 0.1.0. */
static void checkpoint_file(void) {
    int32_t ids[SAMPLES], labels[SAMPLES];
    moe_net net;
    moe_trainer trainer;
    moe_train_config config;
    moe_data data;
    moe_step step;
    moe_error error;
    int i;
    fill(ids, labels);
    memset(&config, 0, sizeof config);
    memset(&data, 0, sizeof data);
    memset(&step, 0, sizeof step);
    data.n = SAMPLES;
    data.token_ids = ids;
    data.labels = labels;
    data.length = IDS;
    config.batch = SAMPLES;
    config.seed = 5;
    config.warmup = 2;
    config.total_steps = 20;
    config.final_rate = (moe_real)0.1;
    check(moe_net_load(&net, FOLDER "net.safetensors", 1, MOE_KERNELS_C, NULL, &error) == MOE_OK,
          "the model loads with gradients");
    check(moe_trainer_init(&trainer, &net, &config, &error) == MOE_OK, "a trainer of the same settings");
    check(moe_trainer_load(&trainer, FOLDER "checkpoint.safetensors", &error) == MOE_OK, "the checkpoint loads");
    for (i = 0; i < 2; i++)
        check(moe_trainer_step(&trainer, &data, &step, &error) == MOE_OK, "a step after the checkpoint");
    check(near((double)step.loss, answers[TOKENS * D + IDS * CLASSES]), "the loss of the fifth step");
    moe_trainer_free(&trainer);
    moe_net_free(&net);
}

int main(void) {
    check(read_answers(), "answers.txt");
    layer_file();
    model_file();
    checkpoint_file();
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed > 0;
}
