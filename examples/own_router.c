/* A custom router, trained and saved. cc -std=c99 -O2 -I. examples/own_router.c -o own_router -lm
   z_e = -|u - c_e|^2, c [E,D] trained, dz_e/dc_e = 2 (u - c_e); selected: experts with p > *ctx. */
#define MOE_IMPLEMENTATION
#include "moe.h"
#include "cli.h"
#include <stdio.h>
enum { D = 2, E = 4, N = 512 };

static moe_status score(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u, moe_real *z) {
    for (size_t i = 0; i < call->n_tokens * E; i++) {
        const moe_real *c = router->tensors[MOE_ROUTER_CUSTOM] + i % E * D, *at = u + i / E * D;
        z[i] = -(at[0] - c[0]) * (at[0] - c[0]) - (at[1] - c[1]) * (at[1] - c[1]);
    }
    return ctx != NULL ? MOE_OK : MOE_ERR_ARGUMENT;
}

static moe_status score_backward(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                                 const moe_real *dz, moe_real *du, moe_real *dc) {
    for (size_t i = 0; i < call->n_tokens * E * D; i++) {
        const size_t at = i / (E * D) * D + i % D; /* i runs over [token, center, feature] */
        const moe_real slope = 2 * (u[at] - router->tensors[MOE_ROUTER_CUSTOM][i % (E * D)]) * dz[i / D];
        du[at] -= slope;
        if (dc != NULL) dc[i % (E * D)] += slope; /* NULL: the centers are frozen */
    }
    return ctx != NULL ? MOE_OK : MOE_ERR_ARGUMENT;
}

static moe_status select_probable(void *ctx, const moe_router *router, const moe_call *call, const moe_real *z,
                                  const moe_real *p, unsigned char *chosen) {
    for (size_t i = 0; i < call->n_tokens * E; i++) chosen[i] = p[i] > *(const moe_real *)ctx;
    return router != NULL && z != NULL ? MOE_OK : MOE_ERR_ARGUMENT;
}

int main(int argc, char *argv[]) {
    static moe_real x[N * D], y[N * D], least = (moe_real)0.2;
    static const char path[] = "own_router.safetensors", *const settings[] = {
        "n_experts=4 expert=linear", "n_experts=4 expert=linear score=custom select=custom custom_parameters=8"};
    const moe_custom own = {&least, score, score_backward, select_probable, E * D};
    const moe_train_config training = {.criterion = MOE_CRITERION_SQUARED_ERROR, .epochs = 200, .rate = (moe_real)0.02};
    const moe_data data = {.n = N, .x = x, .targets = y};
    moe_net net[3] = {{0}};
    moe_evaluation found[3];
    moe_error error;
    int failed = 0, ended = only_help(argc, argv, "own_router", "trains, saves and loads a custom router");
    if (ended >= 0) return ended;
    if (file_is_there(path)) {
        fprintf(stderr, "own_router: %s is there and would be lost: run this in another folder\n", path);
        return 1;
    }
    for (int i = 0; i < N * D; i++) x[i] = (moe_real)(i * 37 % 101) / 25 - 2;
    for (int i = 0; i < N * D; i++) y[i] = x[i] < 0 ? -x[i] : x[i]; /* linear in each quadrant */
    for (int i = 0; i < 3 && !failed; i++) { /* the linear score; the custom router; the same, loaded */
        moe_layer_config layer = {0};
        failed = i == 2 ? moe_net_save(&net[1], path, &error) || moe_net_load(&net[2], path, 0, 0, NULL, &error)
                        : moe_fields_apply(moe_layer_fields(), &layer, settings[i], &error) ||
                              moe_net_init(&net[i], D, 0, NULL) || moe_net_mixture(&net[i], &layer) ||
                              moe_net_build(&net[i], 1, 3, &error);
        if (!failed && i > 0) net[i].modules[0].layer.router.custom = own; /* a file holds no functions */
        failed = failed || (i < 2 && moe_fit(&net[i], &data, NULL, &training, &error)) ||
                 moe_evaluate(&net[i], &data, training.criterion, &found[i], &error);
        if (failed) fprintf(stderr, "own_router: %s\n", error.message);
        else printf("squared error %.4f\n", (double)found[i].loss);
    }
    for (int i = 0; i < 3; i++) moe_net_free(&net[i]);
    return remove(path) || failed || fflush(stdout) != 0 || found[1].loss != found[2].loss;
}
