/* moe_upcycle.h - MoE layers from a trained dense network - an extra of moe, after moe.h

   Copies a feed-forward into every expert of an MoE layer (sparse upcycling), so that training
   continues from the dense network's quality, and optionally reinitializes a share of each expert's
   hidden units. MIT or public domain, as moe.h.

   Contents (search for the tag)
     >>call        moe_layer_upcycle
     >>code        the implementation

   Recipe
     1. Copy moe_upcycle.h into your project, beside moe.h.
     2. Include it after moe.h. Where MOE_IMPLEMENTATION is defined, it brings its implementation.
     It needs no option and no other extra.

   First program: an MoE layer whose experts are copies computes what the dense network computes.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe.h"
 * #include "moe_upcycle.h"
 * #include <stdio.h>
 * #include <string.h>
 *
 * int main(void) {
 *     static unsigned char work[65536];
 *     moe_layer_config config; // {0}: 8 experts, the best 2 for each token
 *     moe_layer moe, dense;
 *     moe_call call;
 *     moe_error error;
 *     moe_real x[4], y[4], of_dense[4];
 *     int i;
 *     memset(&config, 0, sizeof config);
 *     config.router.d_model = 4;
 *     config.d_ff = 8;
 *     if (moe_layer_create(&moe, &config, 0, 1, NULL, &error)) return puts(error.message), 1;
 *     config.router.n_experts = config.router.top_k = 1;
 *     config.router.weight = MOE_WEIGHT_UNIFORM; // one expert without a choice: dense
 *     if (moe_layer_create(&dense, &config, 0, 2, NULL, &error)) return puts(error.message), 1;
 *     if (moe_layer_upcycle(&moe, &dense, 0, 0, 3, &error)) return puts(error.message), 1;
 *     memset(&call, 0, sizeof call);
 *     for (i = 0; i < 4; i++) x[i] = (moe_real)i;
 *     call.n_tokens = 1;
 *     call.x = x;
 *     call.error = &error;
 *     if (moe_layer_forward(&moe, &call, y, work, sizeof work, NULL))
 *         return puts(error.message), 1;
 *     if (moe_layer_forward(&dense, &call, of_dense, work, sizeof work, NULL))
 *         return puts(error.message), 1;
 *     for (i = 0; i < 4; i++) printf("%.4f %.4f\n", (double)y[i], (double)of_dense[i]);
 *     moe_layer_free(&moe);
 *     moe_layer_free(&dense);
 *     return 0;
 * }
 * --- end ---

   Options: those of moe.h. MOE_NO_TRAIN and MOE_NO_FLOAT leave out everything.

   Errors, NULL and promises are as in moe.h. Threads: there are no globals.
*/
#ifndef MOE_H
#error "moe_upcycle.h: include moe.h before it"
#endif

#ifndef MOE_UPCYCLE_H
#define MOE_UPCYCLE_H

#if !defined(MOE_NO_TRAIN) && !defined(MOE_NO_FLOAT)

#if MOE_REAL_IS_DOUBLE
#define moe_layer_upcycle moe_layer_upcycle_f64
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>call ================================================================================== */

/* Sparse upcycling (Komatsuzaki et al. 2023; Nakamura et al. 2025, Drop-Upcycling): makes every
   expert of layer a copy of dense, the layer of a feed_forward (net.modules[i].layer) or of one
   expert, of the same kind and widths; the router is unchanged. If a token's weights sum to 1,
   copies compute the same as dense. upcycle_share r, 0 to 1: floor(r d_ff) hidden units of each
   expert are chosen at random, the same in all its matrices, and their rows and columns are drawn
   from a normal distribution with the mean and standard deviation of the replaced numbers of that
   matrix; biases are unchanged. upcycle_noise, 0 to 1e6: the standard deviation of noise that is
   then added to all matrices of experts. seed: for all random numbers; those of expert e do not
   depend on the number of experts. Both layers must have their tensors set, and those of layer must
   be writable; it is no longer packed. MOE_ERR_CONFIG: error names the setting that differs;
   MOE_ERR_SHAPE, MOE_ERR_ARGUMENT. On failure layer is unchanged. */
MOE_API moe_status moe_layer_upcycle(moe_layer *layer, const moe_layer *dense, moe_real upcycle_share,
                                     moe_real upcycle_noise, uint64_t seed, moe_error *error);

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_TRAIN */
#endif /* MOE_UPCYCLE_H */

/* ==== >>code ================================================================================== */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_UPCYCLE_IMPLEMENTED)
#define MOEI_UPCYCLE_IMPLEMENTED

#if !defined(MOE_NO_TRAIN) && !defined(MOE_NO_FLOAT)

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the next of `units` units is one of the *left that are still to be chosen. */
static int moei_unit_drawn(moe_rng *rng, size_t units, size_t *left) {
    int drawn = moe_rng_below(rng, units) < *left;
    *left -= (size_t)drawn;
    return drawn;
}

/* Reinitializes the rows or columns of `drawn` hidden units of a matrix. The stride within a unit
   is of_other, between units of_unit. The chooser is a copy, so all matrices of an expert choose
   the same units. */
static void moei_upcycle_units(moe_real *w, size_t units, size_t of_unit, size_t others, size_t of_other, size_t drawn,
                               moe_rng chooser, moe_rng *rng) {
    double n = (double)drawn * (double)others, sum = 0.0;
    double squares = 0.0;
    size_t u, i, left;
    int pass;
    for (pass = 0; pass < 3; pass++) {
        moe_rng choice = chooser;
        for (u = 0, left = drawn; u < units; u++) {
            if (!moei_unit_drawn(&choice, units - u, &left)) continue;
            for (i = 0; i < others; i++) {
                moe_real *at = w + u * of_unit + i * of_other;
                double apart = (double)*at - sum / n;
                if (pass == 0) sum += (double)*at;
                else if (pass == 1) squares += apart * apart;
                else {
                    apart = sqrt(n > 1.0 ? squares / (n - 1.0) : 0.0) * (double)moe_rng_normal(rng);
                    *at = (moe_real)(sum / n + apart);
                }
            }
        }
    }
}

static int moei_is_hidden(int activation) {
    return activation != MOEI_X && activation != MOE_NODE_LOW && activation != MOE_NODE_OUTPUT;
}

/* Makes the expert of `run` from the one of dense. */
static void moei_upcycle_expert(const moei_expert_run *run, const moe_layer *dense, size_t drawn, moe_real noise,
                                moe_rng chooser) {
    size_t units = (size_t)run->layer->config.d_ff, i;
    moe_rng rng;
    int s;
    moe_rng_seed(&rng, moe_rng_next(&chooser));
    for (s = 0; s < run->kind->n_steps; s++) {
        const moei_step *step = &run->kind->steps[s];
        size_t out = run->width[step->to], in = run->width[step->from];
        moe_real *w, *bias;
        const moe_real *from;
        if (step->op != MOEI_STEP_MATMUL) continue;
        from = moei_block(run, step->weight, out * in);
        memcpy(&w, &from, sizeof w);
        memcpy(w, dense->tensors[step->weight], out * in * sizeof(moe_real));
        from = moei_block(run, step->bias, out);
        memcpy(&bias, &from, sizeof bias);
        if (bias != NULL) memcpy(bias, dense->tensors[step->bias], out * sizeof(moe_real));
        if (drawn > 0 && moei_is_hidden(step->to)) moei_upcycle_units(w, units, in, in, 1, drawn, chooser, &rng);
        if (drawn > 0 && moei_is_hidden(step->from)) moei_upcycle_units(w, units, 1, out, in, drawn, chooser, &rng);
        for (i = 0; i < out * in && noise > 0; i++) w[i] += noise * moe_rng_normal(&rng);
    }
}

/* Checks that two layers have experts of the same kind and settings. */
static moe_status moei_upcycle_settings(const moe_layer_config *c, const moe_layer_config *dense, moe_error *error) {
    const moe_field *field = moei_feed_forward_fields;
    char has[40], wanted[40];
    if (dense->router.n_experts != 1)
        return moei_error(error, MOE_ERR_CONFIG, "n_experts = %d: the dense layer must have one expert",
                          dense->router.n_experts);
    for (; field->name != NULL; field++) {
        moe_field_text(field, c, has, sizeof has);
        moe_field_text(field, dense, wanted, sizeof wanted);
        if (moei_strcmp(has, wanted) != 0)
            return moei_error(error, MOE_ERR_CONFIG, "%s = %s: the dense layer has %s", field->name, has, wanted);
    }
    if (c->d_latent > 0 || dense->d_latent > 0)
        return moei_error(error, MOE_ERR_CONFIG, "d_latent = %d: must be 0 in both layers",
                          c->d_latent > 0 ? c->d_latent : dense->d_latent);
    return MOE_OK;
}

/* Checks that both layers have all tensors of experts, with the same shapes. */
static moe_status moei_upcycle_tensors(const moe_layer *layer, const moe_layer *dense, moe_error *error) {
    moe_parameter slot, other;
    int i;
    memset(&slot, 0, sizeof slot);
    memset(&other, 0, sizeof other);
    for (i = MOE_EXPERTS_GATE; i < MOE_SHARED_GATE; i++) {
        if (moei_expert_parameter(&layer->config, layer->config.expert, i, &slot) != 1) continue;
        if (layer->tensors[i] == NULL || dense->tensors[i] == NULL)
            return moei_error(error, MOE_ERR_ARGUMENT, "%s is not set", moei_layer_parameter_name(i));
        if (moei_expert_parameter(&dense->config, dense->config.expert, i, &other) != 1 ||
            slot.shape[1] != other.shape[1] || slot.shape[2] != other.shape[2])
            return moei_error(error, MOE_ERR_SHAPE, "%s has a different shape in the dense layer",
                              moei_layer_parameter_name(i));
    }
    return MOE_OK;
}

moe_status moe_layer_upcycle(moe_layer *layer, const moe_layer *dense, moe_real upcycle_share, moe_real upcycle_noise,
                             uint64_t seed, moe_error *error) {
    moei_expert_run run;
    moe_rng chooser;
    moe_status status;
    size_t first, experts, drawn;
    double units;
    if (layer == NULL || dense == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "%s must not be NULL", layer == NULL ? "layer" : "dense");
    if (!(upcycle_share >= 0 && upcycle_share <= MOEI_R(1.0)))
        return moei_error(error, MOE_ERR_ARGUMENT, "upcycle_share = %g: must be 0 to 1", (double)upcycle_share);
    if (!(upcycle_noise >= 0 && upcycle_noise <= MOEI_R(1e6)))
        return moei_error(error, MOE_ERR_ARGUMENT, "upcycle_noise = %g: must be 0 to 1e6", (double)upcycle_noise);
    status = moei_upcycle_settings(&layer->config, &dense->config, error);
    if (status == MOE_OK) status = moei_upcycle_tensors(layer, dense, error);
    if (status != MOE_OK) return status;
    run = moei_expert_run_begin(layer, layer->config.expert, 0);
    if (upcycle_share > 0 && run.kind->n_stages == 1)
        return moei_error(error, MOE_ERR_CONFIG, "upcycle_share = %g: expert = %s has no hidden units",
                          (double)upcycle_share, moei_expert_names[layer->config.expert]);
    experts = moei_own_experts(&layer->config, &first);
    /* a share of 0.21 may be below 0.21, and a product of 63 must not become 62 */
    units = (double)upcycle_share * (double)layer->config.d_ff;
    drawn = (size_t)(units + units * (MOE_REAL_IS_DOUBLE ? 4e-16 : 5.96e-8));
    for (run.expert = 0; run.expert < experts; run.expert++) {
        moe_rng_seed(&chooser, seed + first + run.expert);
        moei_upcycle_expert(&run, dense, drawn, upcycle_noise, chooser);
    }
    layer->is_packed = 0;
    return MOE_OK;
}

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_TRAIN */
#endif /* MOE_IMPLEMENTATION */
