/* moe_classic.h - classical mixtures of experts - an extra of moe, included after moe.h.

   The losses of Jacobs and Jordan over plain arrays and as training criteria of networks,
   hierarchical mixtures of experts trained by EM, modular networks, and the consistency loss.

   Contents: search for
     >>recipe   >>program   >>options   >>manual   >>sources
     >>losses        moe_mixture_loss, moe_mixture_answer, moe_classic_losses
     >>hierarchical  moe_hme_create, _predict, _log_likelihood, _posteriors, _em, _gradient, _free
     >>modular       moe_modular_init, _step, _free
     >>consistency   moe_consistency_loss
     >>code          the implementation, in the same order

   >>recipe
     In the one source file that defines MOE_IMPLEMENTATION, and wherever you call these functions:
       #include "moe.h"
       #include "examples/extras/moe_classic.h"
     Link as for moe.h (-lm).

   >>program: two gaussian experts in each of two groups learn |x|, a straight line on either side.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe.h"
 * #include "examples/extras/moe_classic.h"
 * #include <stdio.h>
 *
 * int main(void) {
 *     static moe_real x[100], y[100];
 *     static double h[100 * 2 * 2]; // [samples, groups, experts in a group]
 *     double log_likelihood = 0;
 *     moe_hme_config config = {0}; // C++: {}
 *     moe_data data = {0};
 *     moe_hme hme;
 *     moe_error error;
 *     int i;
 *     for (i = 0; i < 100; i++) {
 *         x[i] = (moe_real)(i - 50) / 25;
 *         y[i] = x[i] < 0 ? -x[i] : x[i];
 *     }
 *     data.n = 100;
 *     data.x = x;
 *     data.targets = y;
 *     config.d_in = 1;
 *     config.d_out = 1;
 *     if (moe_hme_create(&hme, &config, 1, NULL, &error)) return puts(error.message), 1;
 *     for (i = 0; i < 50; i++)
 *         if (moe_hme_em(&hme, &data, h, &log_likelihood, &error)) return puts(error.message), 1;
 *     if (moe_hme_predict(&hme, 100, x, y, &error)) return puts(error.message), 1;
 *     printf("log-likelihood %.2f per sample, |-2| = %.2f\n", log_likelihood, (double)y[0]);
 *     moe_hme_free(&hme);
 *     return 0;
 * }
 * --- end ---

   >>options
     None of its own. MOE_NO_TRAIN leaves everything here out. In the double build each public name
     carries the suffix _f64, as in moe.h.

   >>manual
     Classical mixture.  Every sample passes through all E experts, often small complete networks;
     a gate p [n,E] weights their outputs. The criteria cross_entropy and squared_error apply to the
     weighted sum, the others to each expert's own output: experts then compete for samples instead
     of correcting each other.

     Networks.  The last module is an MoE layer with select = dense and weight = raw. The trainer
     takes the losses from the network:
       moe_net_init(&net, 64, MOE_KERNELS_AUTO, NULL);
       net.mixture_losses = moe_classic_losses();       again after loading: files do not store it
       moe_net_mixture(&net, &config);  moe_net_build(&net, 1, seed, &error); training.criterion =
       MOE_CRITERION_EXPECTATION;  moe_fit(&net, &data, NULL, &training, &error);
     Dual temperature: with config.router.expert_temperature = T > 1 the experts learn with
     softmax(z / T) in place of p, so that early favorites do not starve the others; the gate
     learns with p. Decoupled training: train the experts on parts of the data, set MOE_PARAM_FROZEN
     in the flags of their tensors, then train the gate. An attentive gate teaches an ordinary one
     by loss_distill, with its logits as the teacher.

     Your own networks.  Run experts and gate yourself, pass their outputs and p to
     moe_mixture_loss, and continue the backward pass with d_outputs and d_p. For an MoE layer, use
     expert_outputs of its pass and moe_layer_backward_experts.

     Hierarchical mixture.  A gate chooses among G groups, a gate in each group among E experts; all
     are linear in x. EM needs no learning rate and never lowers the likelihood; it finds a local
     maximum, so try several seeds. Standardize x.

     Modular networks.  Every MoE layer chooses one module per sample, and the choices are latent:
     hard EM keeps the best choices found so far for each sample (E-step) and trains modules and
     gates on them (M-step). Keep each batch's choices between its steps.

   >>sources
     Jacobs, Jordan, Nowlan, Hinton 1991, Adaptive mixtures of local experts.
     Jordan, Jacobs 1994, Hierarchical mixtures of experts and the EM algorithm.
     Boehning 1992, Multinomial logistic regression algorithm.
     Krishnamurthy, Watkins, Gaertner 2023, Improving expert specialization in mixture of experts
       (expectation and stochastic losses, dual temperature, attentive gate).
     Kirsch, Kunze, Barber 2018, Modular networks: learning to decompose neural computation.
     Zuo et al. 2022, Taming sparsely activated transformer with stochastic experts (THOR).
*/
#ifndef MOE_H
#error "moe_classic.h: include moe.h before it"
#endif

#ifndef MOE_CLASSIC_H
#define MOE_CLASSIC_H

#ifndef MOE_NO_TRAIN
#if MOE_REAL_IS_DOUBLE
#define moe_classic_losses moe_classic_losses_f64
#define moe_consistency_loss moe_consistency_loss_f64
#define moe_hme_create moe_hme_create_f64
#define moe_hme_em moe_hme_em_f64
#define moe_hme_free moe_hme_free_f64
#define moe_hme_gradient moe_hme_gradient_f64
#define moe_hme_log_likelihood moe_hme_log_likelihood_f64
#define moe_hme_posteriors moe_hme_posteriors_f64
#define moe_hme_predict moe_hme_predict_f64
#define moe_mixture_answer moe_mixture_answer_f64
#define moe_mixture_loss moe_mixture_loss_f64
#define moe_modular_free moe_modular_free_f64
#define moe_modular_init moe_modular_init_f64
#define moe_modular_step moe_modular_step_f64
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- >>losses of the classical mixture, over plain arrays ---- */

/* Sets *loss to the mean over samples of the criterion (MOE_CRITERION_), where
   l_i = -log softmax(o_i)[label] and s_i = sum_j (o_ij - target_j)^2 / 2:
     cross_entropy        -log softmax(sum_i p_i o_i / T)[label]
     squared_error        sum_j (sum_i p_i o_ij - target_j)^2 / 2
     expectation          -log sum_i p_i exp(-l_i), the sum being sum_i p_i softmax(o_i)[label]
     stochastic           sum_i p_i l_i
     stochastic_squared   sum_i p_i s_i
     jacobs               -log sum_i p_i exp(-l_i / 2)
     jacobs_squared       -log sum_i p_i exp(-s_i)
   (Jacobs, Jordan, Nowlan, Hinton 1991). d_p [n,E] and d_outputs [E,n,C] receive the gradients;
   either may be NULL, neither may overlap an input. With expert_p (dual temperature) *loss and d_p
   belong to the loss under p, d_outputs to the loss under expert_p. Computed in double by
   log-sum-exp; gradients are clamped to 1e38 (1e308 in the double build) in magnitude, which only
   p_i = 0 or huge values exceed. n = 0 gives 0.
   MOE_ERR_ARGUMENT: unknown criterion, an array is missing, p is below 0, a label or T is out of
   range; MOE_ERR_NONFINITE: an array holds NaN or infinity, or the loss is not finite, as when all
   p are 0 under a log; MOE_ERR_OVERFLOW. error names row and value. A failed call changes nothing.
   Allocates nothing; thread-safe for different results. */
MOE_API moe_status moe_mixture_loss(int criterion, const moe_mixture *mixture, moe_real *loss, moe_real *d_p,
                                    moe_real *d_outputs, moe_error *error);

/* Sets answer [n,C], which may not overlap an input, to
     cross_entropy, squared_error   sum_i p_i o_i / T
     expectation                    sum_i p_i softmax(o_i)
     the others                     the output of one expert: without rng (NULL) the one with the
                                    largest p, the first of equals; with rng one drawn with
                                    probability proportional to p, one draw per sample
   labels, targets and expert_p are not read. Errors as for moe_mixture_loss; a failed call changes
   nothing. */
MOE_API moe_status moe_mixture_answer(int criterion, const moe_mixture *mixture, moe_rng *rng, moe_real *answer,
                                      moe_error *error);

/* Both functions as a table for networks: net.mixture_losses = moe_classic_losses(). The table is
   constant and never freed. */
MOE_API const moe_mixture_losses *moe_classic_losses(void);

/* ---- >>hierarchical mixtures of experts ---- */

/* What an expert of a hierarchical mixture predicts: numbers, or a class. */
enum { MOE_HME_GAUSSIAN = 0, MOE_HME_SOFTMAX, MOE_HME_COUNT };

/* 0 in a field means the value in brackets; d_in and d_out must be set. */
typedef struct moe_hme_config {
    int d_in;              /* d, inputs */
    int d_out;             /* C, numbers or classes */
    int n_groups;          /* G [2] */
    int n_experts;         /* E, experts in a group [2] */
    int family;            /* MOE_HME_ [gaussian] */
    /* IRLS steps per EM iteration for a gate or softmax expert, 1 to 100 [2] */
    int steps;
    /* fixed variance of all gaussian experts, 1e-12 to 1e12 [0: estimated, starting from 1, or from
       min_variance if that is larger] */
    moe_real variance;
    /* lower bound of estimates, 1e-12 to 1e12, without which the likelihood has no maximum
       [1e-6] */
    moe_real min_variance;
} moe_hme_config;

/* A hierarchical mixture of experts (Jordan, Jacobs 1994). With x followed by a 1,
     p(y | x) = sum_i g_i sum_j g_{j|i} p_ij(y | x)       g = softmax(gate x)   g_{.|i} =
                                                          softmax(gates_i x)
     gaussian   p_ij = product over k of N(y_k; (experts_ij x)_k, variances_ij)
     softmax    p_ij = softmax(experts_ij x)[label]
   Parameters and sums are double in both builds. Parameters start at random, for inputs of about
   unit variance: standardize x. Calls that take it as const are thread-safe. */
typedef struct moe_hme {
    moe_hme_config config; /* with defaults filled in */
    double *gate;          /* [G,d+1], in each row the bias last */
    double *gates;         /* [G,E,d+1] */
    double *experts;       /* [G,E,C,d+1] */
    double *variances;     /* [G,E], read by the gaussian family only */
    double *parameters;    /* all of the above, one after another */
    size_t n_parameters;
    /* private: workspace of em and gradient */
    double *kept, *best, *gradient, *normal, *outputs, *groups;
    size_t row, width, in_group, all;                           /* private: d + 1, C, E, G E */
    void *memory;                                               /* owned */
    size_t memory_size;                                         /* bytes */
    moe_allocator allocator;
} moe_hme;

/* Creates a mixture that owns its parameters and workspace; their size depends on config alone.
   allocator NULL: the standard heap. Call moe_hme_free in the end. MOE_ERR_CONFIG: error names
   field and value; MOE_ERR_MEMORY, MOE_ERR_OVERFLOW. On failure *hme is unchanged. */
MOE_API moe_status moe_hme_create(moe_hme *hme, const moe_hme_config *config, uint64_t seed,
                                  const moe_allocator *allocator, moe_error *error);
/* Frees the memory of create; {0}, NULL and a second call are harmless. */
MOE_API void moe_hme_free(moe_hme *hme);

/* Sets y [n,C] = sum_i g_i sum_j g_{j|i} y_ij for x [n,d]: the mean, or class probabilities. Errors
   of this function and those that follow: MOE_ERR_STATE (not created), MOE_ERR_ARGUMENT (an array
   is missing, a label is out of range), MOE_ERR_NONFINITE (in x, a target or a result),
   MOE_ERR_OVERFLOW; error names row and value. After a failure the result arrays are unspecified;
   *log_likelihood and *hme are unchanged. None of them allocates. */
MOE_API moe_status moe_hme_predict(const moe_hme *hme, size_t n, const moe_real *x, moe_real *y, moe_error *error);
/* Mean over samples of log p(y | x), y from data->targets (gaussian) or data->labels (softmax); n =
   0 gives 0. */
MOE_API moe_status moe_hme_log_likelihood(const moe_hme *hme, const moe_data *data, double *log_likelihood,
                                          moe_error *error);
/* Sets group [n,G] = h_i and expert [n,G,E] = h_{j|i}: the gates' probabilities given x and y, or
   given x alone where data has no y. */
MOE_API moe_status moe_hme_posteriors(const moe_hme *hme, const moe_data *data, double *group, double *expert,
                                      moe_error *error);
/* One EM iteration. E-step: the caller's h [n,G,E] receives h_i h_{j|i} under the parameters before
   the call. M-step: each gate and expert increases its own weighted log-likelihood, by least
   squares for gaussian experts, then their variances; by IRLS for gates and softmax experts, one
   Newton step per row, halved until the likelihood does not decrease (Boehning 1992 bounds how
   often). Equations are solved for the change, by Cholesky with 1e-10 of the diagonal added:
   directions that the data do not determine, and models without posterior mass, do not change.
   *log_likelihood (may be NULL) is the mean after the iteration, never below the previous one: an
   iteration that rounding makes worse is undone. */
MOE_API moe_status moe_hme_em(moe_hme *hme, const moe_data *data, double *h, double *log_likelihood, moe_error *error);
/* One step of gradient ascent, parameters += rate * gradient of the mean log-likelihood; variances
   take the step in their logarithm, down to min_variance. h as in moe_hme_em; *log_likelihood (may
   be NULL) is the one before the step. MOE_ERR_NONFINITE also when the step is too large. */
MOE_API moe_status moe_hme_gradient(moe_hme *hme, const moe_data *data, moe_real rate, double *h,
                                    double *log_likelihood, moe_error *error);

/* ---- >>modular networks ---- */

/* A modular network (Kirsch, Kunze, Barber 2018): the gate of every MoE layer chooses one of its
   modules for each sample, the choices are latent, and training is hard EM. Every MoE layer of the
   trainer's network has select = sample, top_k = 1, and loss_distill > 0 without student, by which
   its gate learns the assigned choices; weight = one leaves module outputs unweighted. (To train
   the same network by gradient, use weight = raw and moe_fit.) */
typedef struct moe_modular {
    moe_trainer *trainer;
    /* Private; the memory is owned. */
    void *memory;
    size_t memory_size;
    moe_real *teacher;
    size_t n_teacher, n_mixtures;
    int32_t *candidate;
    double *best, *drawn;
    unsigned char *changed;
    int32_t *sequences;
    void *net_work;
    size_t net_size;
} moe_modular;

/* Results of one EM step. */
typedef struct moe_modular_step_result {
    /* mean over samples of -loss + sum over layers of ln p(choice) of the assigned
       choices, before the M-step */
    double log_likelihood;
    double changed;        /* share of the samples whose assignment the E-step changed, 0 to 1 */
    moe_step last;         /* of the last step of the trainer */
} moe_modular_step_result;

/* Allocates memory for batches of trainer->config.batch samples; the trainer must outlive *modular.
   Call moe_modular_free in the end. MOE_ERR_CONFIG: error names the MoE layer that does not qualify
   (none does with a criterion that reads experts), or there is none; MOE_ERR_UNSUPPORTED with
   net.transport; MOE_ERR_MEMORY, MOE_ERR_OVERFLOW. On failure *modular is unchanged. */
MOE_API moe_status moe_modular_init(moe_modular *modular, moe_trainer *trainer, moe_error *error);
/* Frees the memory of init; {0}, NULL and a second call are harmless. */
MOE_API void moe_modular_free(moe_modular *modular);
/* One EM step on a batch. The caller keeps choices [MoE layers, n] between the steps of a batch:
   the module of each sample at each MoE layer, -1 at first. E-step: among the current choices and
   `draws` choices drawn from the gates, each sample keeps the best by -loss + sum ln p, so this
   value never falls. M-step: m_steps steps of the trainer on the assigned choices. draws and
   m_steps are 0 or more (draws = 0 needs current choices). result may be NULL. Errors as for
   moe_trainer_step, and MOE_ERR_ARGUMENT for padding and for a sample for which a gate chooses no
   module, as its probabilities may all be 0; choices then hold the E-step's result. */
MOE_API moe_status moe_modular_step(moe_modular *modular, const moe_data *batch, int draws, int m_steps,
                                    int32_t *choices, moe_modular_step_result *result, moe_error *error);

/* ---- >>consistency of two passes ---- */

/* Mean over n rows of (KL(p || q) + KL(q || p)) / 2 with p = softmax(a) and q = softmax(b), a and b
   [n,classes]: how far two passes with different random choices disagree (Zuo et al. 2022). da and
   db (may be NULL) receive the gradients. n = 0 gives 0. Logits up to 1e30 in magnitude give finite
   results; NaN or infinity gives NaN. Allocates nothing; thread-safe. */
MOE_API moe_real moe_consistency_loss(size_t n, size_t classes, const moe_real *a, const moe_real *b, moe_real *da,
                                      moe_real *db);

#ifdef __cplusplus
}
#endif
#endif /* MOE_NO_TRAIN */
#endif /* MOE_CLASSIC_H */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_CLASSIC_IMPLEMENTED)
#define MOEI_CLASSIC_IMPLEMENTED
#ifndef MOE_NO_TRAIN

/* ==== >>code ================================================================================== */

/* log sum exp of a stream: the largest term, and the sum of exp(term - largest) over the others. */
typedef struct moei_lse {
    double largest, rest;
} moei_lse;

static const moei_lse moei_lse_empty = {-1e308, -1.0}; /* the first term sets rest to 0 */

static void moei_lse_add(moei_lse *s, double term) {
    if (term > s->largest) {
        s->rest = (s->rest + 1.0) * exp(s->largest - term);
        s->largest = term;
    } else s->rest += exp(term - s->largest);
}

static double moei_lse_value(const moei_lse *s) { return s->largest + log1p(s->rest); }

/* A term's share of the sum: the shares add up to 1, however large the terms. */
static double moei_lse_share(const moei_lse *s, double term) { return exp(term - s->largest) / (1.0 + s->rest); }

/* Whether a double is in the range of moe_real. */
static int moei_fits_real(double v) { return fabs(v) <= (MOE_REAL_IS_DOUBLE ? 1e308 : 1e38); }

static moe_real moei_cut(double v) {
    double limit = MOE_REAL_IS_DOUBLE ? 1e308 : 1e38;
    return (moe_real)(v > limit ? limit : v < -limit ? -limit : v);
}

/* Checks the labels of n samples, 0 to width - 1, or their targets [n,width]. */
static moe_status moei_wanted_check(int squared, const int32_t *labels, const moe_real *targets, size_t n, size_t width,
                                    moe_error *error) {
    size_t t;
    if ((squared ? (const void *)targets : (const void *)labels) == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "%s must not be NULL", squared ? "targets" : "labels");
    if (squared) return moei_reals_check("targets", targets, n, width, error);
    for (t = 0; t < n; t++)
        if (labels[t] < 0 || (size_t)labels[t] >= width)
            return moei_error(error, MOE_ERR_ARGUMENT, "labels[%z] = %d: must be 0 to %z", t, (int)labels[t],
                              width - 1);
    return MOE_OK;
}

/* ---- losses ---- */

/* How the loss l of one output (cross-entropy, or half the squared error) becomes that of a
   mixture:
     blend   l(sum_i p_i o_i / T)
     mean    sum_i p_i l(o_i)
     log     -log sum_i p_i exp(-sharpness l(o_i)) */
enum { MOEI_MIX_BLEND = 0, MOEI_MIX_MEAN, MOEI_MIX_LOG };
enum { MOEI_ANSWER_BLEND = 0, MOEI_ANSWER_PROBABILITIES, MOEI_ANSWER_CHOSEN };

typedef struct moei_mix {
    int rule, squared, answer;
    double sharpness;
} moei_mix;

static const moei_mix moei_mixes[MOE_CRITERION_COUNT] = {
    {MOEI_MIX_BLEND, 0, MOEI_ANSWER_BLEND, 1.0},       /* cross_entropy */
    {MOEI_MIX_BLEND, 1, MOEI_ANSWER_BLEND, 1.0},       /* squared_error */
    {MOEI_MIX_LOG, 0, MOEI_ANSWER_PROBABILITIES, 1.0}, /* expectation */
    {MOEI_MIX_MEAN, 0, MOEI_ANSWER_CHOSEN, 1.0},       /* stochastic */
    {MOEI_MIX_MEAN, 1, MOEI_ANSWER_CHOSEN, 1.0},       /* stochastic_squared */
    {MOEI_MIX_LOG, 0, MOEI_ANSWER_CHOSEN, 0.5},        /* jacobs */
    {MOEI_MIX_LOG, 1, MOEI_ANSWER_CHOSEN, 1.0}};       /* jacobs_squared */

/* One output of a sample, scale * sum_i p_i o_i, and its loss; for a single expert the sum has one
   term. */
typedef struct moei_blend {
    const moe_real *o, *p; /* o_i begins at o + i stride */
    size_t experts, stride, label;
    double scale, at_label, loss;
    const moe_real *target; /* NULL: cross-entropy */
} moei_blend;

/* All experts of sample t weighted by p [E], or with p NULL expert i alone. */
static moei_blend moei_blend_of(const moe_mixture *m, size_t t, const moe_real *p, size_t i) {
    static const moe_real alone = MOEI_R(1.0);
    moei_blend b;
    memset(&b, 0, sizeof b);
    b.o = m->outputs + (p != NULL ? t : i * m->n + t) * m->width;
    b.p = p != NULL ? p : &alone;
    b.experts = p != NULL ? m->experts : 1;
    b.stride = m->n * m->width;
    b.scale = m->temperature > 0 ? 1.0 / (double)m->temperature : 1.0;
    return b;
}

static double moei_blend_at(const moei_blend *b, size_t j) {
    double sum = 0.0;
    size_t i;
    for (i = 0; i < b->experts; i++) sum += (double)b->p[i] * (double)b->o[i * b->stride + j];
    return sum * b->scale;
}

/* moei_blend_of with the loss. Terms are relative to the label's, so that a small loss beside large
   outputs keeps its precision. */
static moei_blend moei_blend_measured(const moei_mix *mix, const moe_mixture *m, size_t t, const moe_real *p,
                                      size_t i) {
    moei_blend b = moei_blend_of(m, t, p, i);
    moei_lse sum = moei_lse_empty;
    size_t j;
    if (mix->squared) b.target = m->targets + t * m->width;
    else {
        b.label = (size_t)m->labels[t];
        b.at_label = moei_blend_at(&b, b.label);
    }
    for (j = 0; j < m->width; j++) {
        double e = moei_blend_at(&b, j) - (mix->squared ? (double)b.target[j] : b.at_label);
        if (mix->squared) b.loss += 0.5 * e * e;
        else moei_lse_add(&sum, e);
    }
    if (!mix->squared) b.loss = moei_lse_value(&sum);
    return b;
}

/* dl / d output_j */
static double moei_blend_slope(const moei_blend *b, size_t j) {
    if (b->target != NULL) return moei_blend_at(b, j) - (double)b->target[j];
    return exp(moei_blend_at(b, j) - b->at_label - b->loss) - (j == b->label ? 1.0 : 0.0);
}

/* The loss of sample t under the gate p [E]. */
static double moei_mix_loss(const moei_mix *mix, const moe_mixture *m, size_t t, const moe_real *p) {
    moei_lse log_sum = moei_lse_empty;
    double sum = 0.0, loss;
    size_t i;
    if (mix->rule == MOEI_MIX_BLEND) return moei_blend_measured(mix, m, t, p, 0).loss;
    for (i = 0; i < m->experts; i++) {
        if (!(p[i] > 0)) continue;
        loss = moei_blend_measured(mix, m, t, NULL, i).loss;
        if (mix->rule == MOEI_MIX_MEAN) sum += (double)p[i] * loss;
        else moei_lse_add(&log_sum, log((double)p[i]) - mix->sharpness * loss);
    }
    return mix->rule == MOEI_MIX_MEAN ? sum : -moei_lse_value(&log_sum);
}

/* d_p [E] and d_o (the row of expert i begins at d_o + i n C) are the gradient of sample t, d_p
   under the gate p, d_o under q. dL / dp_i is sum_j l'_j o_ij / T (blend), l_i (mean) or -exp(L - s
   l_i) (log). dL / do_i is l' times q_i (blend, mean) or s times the posterior of i (log). */
static void moei_mix_backward(const moei_mix *mix, const moe_mixture *m, size_t t, const moe_real *p, const moe_real *q,
                              moe_real *d_p, moe_real *d_o) {
    int blend = mix->rule == MOEI_MIX_BLEND, logs = mix->rule == MOEI_MIX_LOG;
    double loss_p = logs ? moei_mix_loss(mix, m, t, p) : 0.0;
    double loss_q = logs && q != p ? moei_mix_loss(mix, m, t, q) : loss_p;
    moei_blend gate = moei_blend_measured(mix, m, t, blend ? p : NULL, 0);
    moei_blend into = blend ? moei_blend_measured(mix, m, t, q, 0) : gate;
    double by_p, weight;
    size_t i, j;
    for (i = 0; i < m->experts; i++) {
        if (!blend && i > 0) gate = into = moei_blend_measured(mix, m, t, NULL, i);
        by_p = logs ? -exp(loss_p - mix->sharpness * into.loss) : blend ? 0.0 : into.loss;
        for (j = 0; blend && d_p != NULL && j < m->width; j++)
            by_p += gate.scale * moei_blend_slope(&gate, j) * (double)gate.o[i * gate.stride + j];
        weight = (double)q[i];
        if (logs && weight > 0.0) weight = mix->sharpness * exp(log(weight) + loss_q - mix->sharpness * into.loss);
        if (d_p != NULL) d_p[i] = moei_cut(by_p / (double)m->n);
        for (j = 0; d_o != NULL && j < m->width; j++)
            d_o[i * gate.stride + j] =
                moei_cut(weight > 0.0 ? weight * into.scale * moei_blend_slope(&into, j) / (double)m->n : 0.0);
    }
}

static moe_status moei_gates_check(const char *name, const moe_real *p, size_t n, size_t experts, moe_error *error) {
    size_t i;
    moe_status status = moei_reals_check(name, p, n, experts, error);
    for (i = 0; status == MOE_OK && i < n * experts; i++)
        if (p[i] < 0)
            return moei_error(error, MOE_ERR_ARGUMENT, "%s[%z][%z] = %g: must not be below 0", name, i / experts,
                              i % experts, (double)p[i]);
    return status;
}

/* result: the caller's output. learning: also checks labels or targets. */
static moe_status moei_mixture_check(int criterion, const moe_mixture *m, const void *result, int learning,
                                     moe_error *error) {
    moe_real low = criterion == MOE_CRITERION_CROSS_ENTROPY ? MOEI_R(1e-6) : MOEI_R(1.0);
    moe_real high = MOEI_R(1.0) / low;
    size_t rows, cells;
    moe_status status;
    if (criterion < 0 || criterion >= MOE_CRITERION_COUNT)
        return moei_error(error, MOE_ERR_ARGUMENT, "criterion = %d: no such criterion", criterion);
    if (m == NULL || result == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "mixture and result must not be NULL");
    if (m->experts == 0 || m->width == 0)
        return moei_error(error, MOE_ERR_ARGUMENT, "experts = %z, width = %z: must be 1 or more", m->experts, m->width);
    if (!moe_is_finite(m->temperature) || m->temperature < 0 || m->temperature > high ||
        (m->temperature > 0 && m->temperature < low))
        return moei_error(error, MOE_ERR_ARGUMENT, "temperature = %g: must be %g to %g", (double)m->temperature,
                          (double)low, (double)high);
    if (m->n == 0) return MOE_OK;
    if (!moei_mul(m->n, m->experts, &rows) || !moei_mul(rows, m->width, &cells) ||
        !moei_mul(cells, sizeof(moe_real), &cells))
        return moei_error(error, MOE_ERR_OVERFLOW, "n = %z, experts = %z, width = %z: too large", m->n, m->experts,
                          m->width);
    if (m->p == NULL || m->outputs == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "p and outputs must not be NULL");
    status = moei_gates_check("p", m->p, m->n, m->experts, error);
    if (status == MOE_OK) status = moei_reals_check("outputs", m->outputs, rows, m->width, error);
    if (status != MOE_OK || !learning) return status;
    if (m->expert_p != NULL) status = moei_gates_check("expert_p", m->expert_p, m->n, m->experts, error);
    if (status != MOE_OK) return status;
    return moei_wanted_check(moei_mixes[criterion].squared, m->labels, m->targets, m->n, m->width, error);
}

/* The mean loss under the gate p [n,E]. */
static moe_status moei_mixture_mean(int criterion, const moe_mixture *m, const moe_real *p, double *mean,
                                    moe_error *error) {
    size_t t;
    *mean = 0.0;
    for (t = 0; t < m->n; t++) {
        *mean += moei_mix_loss(&moei_mixes[criterion], m, t, p + t * m->experts) / (double)m->n;
        if (!moei_fits_real(*mean))
            return moei_error(error, MOE_ERR_NONFINITE,
                              "the loss of sample %z is not finite: p is all 0, or numbers are too large", t);
    }
    return MOE_OK;
}

moe_status moe_mixture_loss(int criterion, const moe_mixture *mixture, moe_real *loss, moe_real *d_p,
                            moe_real *d_outputs, moe_error *error) {
    const moe_mixture *m = mixture;
    const moei_mix *mix;
    double mean, unused;
    size_t t;
    moe_status status = moei_mixture_check(criterion, m, loss, 1, error);
    if (status == MOE_OK) status = moei_mixture_mean(criterion, m, m->p, &mean, error);
    if (status == MOE_OK && m->expert_p != NULL) status = moei_mixture_mean(criterion, m, m->expert_p, &unused, error);
    if (status != MOE_OK) return status;
    mix = &moei_mixes[criterion];
    for (t = 0; (d_p != NULL || d_outputs != NULL) && t < m->n; t++) {
        size_t row = t * m->experts;
        const moe_real *p = m->p + row, *q = m->expert_p != NULL ? m->expert_p + row : p;
        moe_real *d_gate = d_p != NULL ? d_p + row : NULL;
        moei_mix_backward(mix, m, t, p, q, d_gate, d_outputs != NULL ? d_outputs + t * m->width : NULL);
    }
    *loss = (moe_real)mean;
    return MOE_OK;
}

/* The index of the largest p, the first of equals; with an rng one drawn in proportion to p. */
static size_t moei_mixture_choice(size_t n, const moe_real *p, moe_rng *rng) {
    size_t i, chosen = moei_max_index(n, p);
    double left = 0.0;
    if (rng == NULL) return chosen;
    for (i = 0; i < n; i++) left += (double)p[i];
    left *= (double)moe_rng_uniform(rng);
    for (i = 0; i < n && left >= 0.0; i++) {
        if (p[i] > 0) chosen = i;
        left -= (double)p[i];
    }
    return chosen;
}

/* answer [C] += p softmax(output of expert i) */
static void moei_mixture_add(const moe_mixture *m, size_t t, size_t i, moe_real p, moe_real *answer) {
    const moei_blend own = moei_blend_of(m, t, NULL, i);
    moei_lse sum = moei_lse_empty;
    size_t j;
    for (j = 0; j < m->width; j++) moei_lse_add(&sum, moei_blend_at(&own, j));
    for (j = 0; j < m->width; j++) {
        double probability = moei_lse_share(&sum, moei_blend_at(&own, j));
        answer[j] = moei_cut((double)answer[j] + (double)p * probability);
    }
}

moe_status moe_mixture_answer(int criterion, const moe_mixture *mixture, moe_rng *rng, moe_real *answer,
                              moe_error *error) {
    const moe_mixture *m = mixture;
    int chosen, sum;
    size_t t, i, j;
    moe_status status = moei_mixture_check(criterion, m, answer, 0, error);
    if (status != MOE_OK) return status;
    chosen = moei_mixes[criterion].answer == MOEI_ANSWER_CHOSEN;
    sum = moei_mixes[criterion].answer == MOEI_ANSWER_PROBABILITIES;
    for (t = 0; t < m->n; t++, answer += m->width) {
        const moe_real *p = m->p + t * m->experts;
        moei_blend b = moei_blend_of(m, t, chosen ? NULL : p, chosen ? moei_mixture_choice(m->experts, p, rng) : 0);
        for (j = 0; j < m->width; j++) answer[j] = sum ? 0 : moei_cut(moei_blend_at(&b, j));
        for (i = 0; sum && i < m->experts; i++) moei_mixture_add(m, t, i, p[i], answer);
    }
    return MOE_OK;
}

const moe_mixture_losses *moe_classic_losses(void) {
    static const moe_mixture_losses losses = {moe_mixture_loss, moe_mixture_answer};
    return &losses;
}

/* ---- hierarchical mixtures ---- */

static const char *const moei_hme_names[] = {"gaussian", "softmax", NULL};

#define MOEI_H moe_hme_config

static const moe_field moei_hme_fields[] = {
    MOEI_INT(MOEI_H, d_in, 1, MOE_MAX_WIDTH, "width of x"),
    MOEI_INT(MOEI_H, d_out, 1, MOE_MAX_WIDTH, "numbers or classes"),
    MOEI_INT(MOEI_H, n_groups, 1, MOE_MAX_EXPERTS, "groups"),
    MOEI_INT(MOEI_H, n_experts, 1, MOE_MAX_EXPERTS, "experts in a group"),
    MOEI_CHOICE(MOEI_H, family, MOE_HME_COUNT, moei_hme_names, "what experts predict"),
    MOEI_INT(MOEI_H, steps, 1, 100, "IRLS steps per EM iteration"),
    MOEI_REAL(MOEI_H, variance, 1e-12, 1e12, "fixed variance of gaussian experts"),
    MOEI_REAL(MOEI_H, min_variance, 1e-12, 1e12, "least variance of gaussian experts"),
    MOEI_FIELDS_END};

static moe_status moei_hme_check(const moe_hme_config *config, moe_hme_config *out, moe_error *error) {
    moe_status status;
    if (config == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "config must not be NULL");
    status = moei_fields_check(moei_hme_fields, config, error);
    if (status != MOE_OK) return status;
    if (config->d_in == 0 || config->d_out == 0)
        return moei_error(error, MOE_ERR_CONFIG, "d_in = %d, d_out = %d: both must be set", config->d_in,
                          config->d_out);
    *out = *config;
    moei_default(&out->n_groups, 2);
    moei_default(&out->n_experts, 2);
    moei_default(&out->steps, 2);
    moei_default_real(&out->min_variance, MOEI_R(1e-6));
    return MOE_OK;
}

/* Every gate and every expert has rows of d + 1 weights. The workspace is for the one with the most
   rows; its sizes cannot overflow because the total of all rows does not. */
static void moei_hme_layout(moe_hme *hme, moei_layout *l) {
    size_t groups = (size_t)hme->config.n_groups, rows, square, widest;
    hme->row = (size_t)hme->config.d_in + 1;
    hme->width = (size_t)hme->config.d_out;
    hme->in_group = (size_t)hme->config.n_experts;
    if (!moei_mul(groups, hme->in_group, &hme->all) || !moei_mul(hme->all, hme->width, &rows) ||
        !moei_add(rows, hme->all, &rows) || !moei_add(rows, groups, &rows) || !moei_mul(rows, hme->row, &rows) ||
        !moei_add(rows, hme->all, &hme->n_parameters) || !moei_mul(hme->row, hme->row, &square)) {
        l->overflow = 1;
        return;
    }
    widest = groups > hme->in_group ? groups : hme->in_group;
    if (widest < hme->width) widest = hme->width;
    hme->parameters = (double *)moei_take(l, hme->n_parameters, sizeof(double));
    hme->kept = (double *)moei_take(l, hme->n_parameters, sizeof(double));
    hme->best = (double *)moei_take(l, widest * hme->row, sizeof(double));
    hme->gradient = (double *)moei_take(l, widest * hme->row, sizeof(double));
    hme->normal = (double *)moei_take(l, square, sizeof(double));
    hme->outputs = (double *)moei_take(l, widest, sizeof(double));
    hme->groups = (double *)moei_take(l, groups, sizeof(double));
    if (l->base == NULL) return;
    hme->gate = hme->parameters;
    hme->gates = hme->gate + groups * hme->row;
    hme->experts = hme->gates + hme->all * hme->row;
    hme->variances = hme->experts + hme->all * hme->width * hme->row;
}

/* Initial parameters: gates split the inputs; experts begin nearly equal, so that at first only the
   gates distinguish them. */
static void moei_hme_start(moe_hme *hme, uint64_t seed) {
    double *p = hme->parameters, over_root = 1.0 / sqrt((double)hme->config.d_in);
    const double least = (double)hme->config.min_variance; /* a start below it could only fall */
    moe_rng rng;
    moe_rng_seed(&rng, seed);
    for (; p < hme->experts; p++) *p = 2.0 * over_root * (double)moe_rng_normal(&rng);
    for (; p < hme->variances; p++) *p = 0.1 * over_root * (double)moe_rng_normal(&rng);
    for (; p < hme->parameters + hme->n_parameters; p++)
        *p = hme->config.variance > 0 ? (double)hme->config.variance : least > 1.0 ? least : 1.0;
}

moe_status moe_hme_create(moe_hme *hme, const moe_hme_config *config, uint64_t seed, const moe_allocator *allocator,
                          moe_error *error) {
    moei_layout l = moei_layout_begin(NULL);
    moe_hme made;
    moe_status status;
    if (hme == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "hme must not be NULL");
    memset(&made, 0, sizeof made);
    status = moei_hme_check(config, &made.config, error);
    if (status != MOE_OK) return status;
    if (!moei_can_allocate(allocator))
        return moei_error(error, MOE_ERR_ARGUMENT, "allocator must not be NULL in this build");
    if (allocator != NULL) made.allocator = *allocator;
    moei_hme_layout(&made, &l);
    if (l.overflow) return moei_error(error, MOE_ERR_OVERFLOW, "the mixture does not fit this machine's memory");
    made.memory_size = l.used;
    made.memory = moei_alloc(&made.allocator, made.memory_size, 1);
    if (made.memory == NULL)
        return moei_error(error, MOE_ERR_MEMORY, "no memory for %z bytes of the mixture", made.memory_size);
    l = moei_layout_begin(made.memory);
    moei_hme_layout(&made, &l);
    moei_hme_start(&made, seed);
    *hme = made;
    return MOE_OK;
}

void moe_hme_free(moe_hme *hme) {
    if (hme == NULL) return;
    moei_free(&hme->allocator, hme->memory, hme->memory_size);
    memset(hme, 0, sizeof *hme);
}

/* w [d+1] . (x, 1) */
static double moei_hme_dot(const moe_hme *hme, const double *w, const moe_real *x) {
    double sum = w[hme->row - 1];
    size_t q;
    for (q = 0; q + 1 < hme->row; q++) sum += w[q] * (double)x[q];
    return sum;
}

/* log sum exp over rows [n,d+1] of weights. */
static double moei_hme_total(const moe_hme *hme, size_t n, const double *rows, const moe_real *x) {
    moei_lse sum = moei_lse_empty;
    size_t k;
    for (k = 0; k < n; k++) moei_lse_add(&sum, moei_hme_dot(hme, rows + k * hme->row, x));
    return moei_lse_value(&sum);
}

/* log p_ij(y | x) of sample t for expert ij; 0 when data has no y. Not below -1e300, so that
   posteriors stay finite. */
static double moei_hme_density(const moe_hme *hme, const moe_data *data, size_t t, size_t expert) {
    const double *w = hme->experts + expert * hme->width * hme->row;
    const moe_real *x = data->x + t * (hme->row - 1);
    double v = hme->variances[expert], sum = 0.0, e;
    size_t k;
    if (hme->config.family == MOE_HME_SOFTMAX) {
        if (data->labels == NULL) return 0.0;
        sum = moei_hme_dot(hme, w + (size_t)data->labels[t] * hme->row, x) - moei_hme_total(hme, hme->width, w, x);
    }
    for (k = 0; hme->config.family == MOE_HME_GAUSSIAN && data->targets != NULL && k < hme->width; k++) {
        e = (double)data->targets[t * hme->width + k] - moei_hme_dot(hme, w + k * hme->row, x);
        sum -= 0.5 * (e * e / v + log(6.28318530717958648 * v));
    }
    return sum > -1e300 ? sum : -1e300;
}

/* log p(y | x) of sample t; group [G] and expert [G,E] (both or neither NULL) receive h_i and
   h_{j|i}. */
static double moei_hme_sample(const moe_hme *hme, const moe_data *data, size_t t, double *group, double *expert) {
    const moe_real *x = data->x + t * (hme->row - 1);
    moei_lse prior = moei_lse_empty, joint = moei_lse_empty;
    size_t groups = (size_t)hme->config.n_groups, i, e;
    for (i = 0; i < groups; i++) {
        moei_lse inner_prior = moei_lse_empty, inner_joint = moei_lse_empty;
        double z = moei_hme_dot(hme, hme->gate + i * hme->row, x), inner;
        for (e = i * hme->in_group; e < (i + 1) * hme->in_group; e++) {
            double z_e = moei_hme_dot(hme, hme->gates + e * hme->row, x), v = z_e + moei_hme_density(hme, data, t, e);
            moei_lse_add(&inner_prior, z_e);
            moei_lse_add(&inner_joint, v);
            if (expert != NULL) expert[e] = v;
        }
        for (e = i * hme->in_group; expert != NULL && e < (i + 1) * hme->in_group; e++)
            expert[e] = moei_lse_share(&inner_joint, expert[e]);
        inner = z + moei_lse_value(&inner_joint) - moei_lse_value(&inner_prior);
        moei_lse_add(&prior, z);
        moei_lse_add(&joint, inner);
        if (group != NULL) group[i] = inner;
    }
    for (i = 0; group != NULL && i < groups; i++) group[i] = moei_lse_share(&joint, group[i]);
    return moei_lse_value(&joint) - moei_lse_value(&prior);
}

/* The E-step: the mean of log p(y | x), and in h [n,G,E] (may be NULL) h_i h_{j|i}. */
static double moei_hme_expect(const moe_hme *hme, const moe_data *data, double *h) {
    double sum = 0.0;
    size_t t, e;
    for (t = 0; t < data->n; t++) {
        sum += moei_hme_sample(hme, data, t, h != NULL ? hme->groups : NULL, h) / (double)data->n;
        for (e = 0; h != NULL && e < hme->all; e++) h[e] *= hme->groups[e / hme->in_group];
        if (h != NULL) h += hme->all;
    }
    return sum;
}

/* y [C] = sum_ij g_i g_{j|i} y_ij; returns 0 if a sum does not fit. */
static int moei_hme_answer(const moe_hme *hme, const moe_real *x, moe_real *y) {
    double top = moei_hme_total(hme, (size_t)hme->config.n_groups, hme->gate, x), inner = 0.0;
    double total = 0.0, z, g, o;
    int softmax = hme->config.family == MOE_HME_SOFTMAX;
    size_t e, k;
    for (k = 0; k < hme->width; k++) y[k] = 0;
    for (e = 0; e < hme->all; e++) {
        const double *gate = hme->gates + e * hme->row, *w = hme->experts + e * hme->width * hme->row;
        if (e % hme->in_group == 0) inner = moei_hme_total(hme, hme->in_group, gate, x);
        if (softmax) total = moei_hme_total(hme, hme->width, w, x);
        z = moei_hme_dot(hme, hme->gate + e / hme->in_group * hme->row, x);
        g = exp(z - top + moei_hme_dot(hme, gate, x) - inner);
        for (k = 0; k < hme->width; k++) {
            o = moei_hme_dot(hme, w + k * hme->row, x);
            o = (double)y[k] + g * (softmax ? exp(o - total) : o);
            if (!moei_fits_real(o)) return 0;
            y[k] = (moe_real)o;
        }
    }
    return 1;
}

/* wants_y: data must have y. result: the caller's output. */
static moe_status moei_hme_check_data(const moe_hme *hme, const moe_data *data, int wants_y, const void *result,
                                      moe_error *error) {
    size_t cells;
    int squared;
    moe_status status;
    if (hme == NULL || data == NULL) return moei_error(error, MOE_ERR_ARGUMENT, "hme and data must not be NULL");
    if (hme->memory == NULL) return moei_error(error, MOE_ERR_STATE, "the mixture is not created");
    if (data->n == 0) return MOE_OK;
    if (data->x == NULL || result == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "x and the array for results must not be NULL");
    cells = hme->all > hme->width ? hme->all : hme->width; /* row length of the widest array */
    if (!moei_mul(data->n, cells > hme->row ? cells : hme->row, &cells) || !moei_mul(cells, sizeof(double), &cells))
        return moei_error(error, MOE_ERR_OVERFLOW, "n = %z: too large", data->n);
    status = moei_reals_check("x", data->x, data->n, hme->row - 1, error);
    squared = hme->config.family == MOE_HME_GAUSSIAN;
    wants_y |= squared ? data->targets != NULL : data->labels != NULL;
    if (status != MOE_OK || !wants_y) return status;
    return moei_wanted_check(squared, data->labels, data->targets, data->n, hme->width, error);
}

/* Stores a log-likelihood for the caller. */
static moe_status moei_hme_return(double value, double *result, moe_error *error) {
    if (!(fabs(value) <= 1e308))
        return moei_error(error, MOE_ERR_NONFINITE, "the log-likelihood is not finite: x or y is too large");
    if (result != NULL) *result = value;
    return MOE_OK;
}

moe_status moe_hme_predict(const moe_hme *hme, size_t n, const moe_real *x, moe_real *y, moe_error *error) {
    moe_data data;
    moe_status status;
    size_t t;
    memset(&data, 0, sizeof data);
    data.n = n;
    data.x = x;
    status = moei_hme_check_data(hme, &data, 0, y, error);
    for (t = 0; status == MOE_OK && t < n; t++)
        if (!moei_hme_answer(hme, x + t * (hme->row - 1), y + t * hme->width))
            return moei_error(error, MOE_ERR_NONFINITE, "y[%z] is not finite: x[%z] is too large", t, t);
    return status;
}

moe_status moe_hme_log_likelihood(const moe_hme *hme, const moe_data *data, double *log_likelihood, moe_error *error) {
    moe_status status = moei_hme_check_data(hme, data, 1, log_likelihood, error);
    return status != MOE_OK ? status : moei_hme_return(moei_hme_expect(hme, data, NULL), log_likelihood, error);
}

moe_status moe_hme_posteriors(const moe_hme *hme, const moe_data *data, double *group, double *expert,
                              moe_error *error) {
    moe_status status = moei_hme_check_data(hme, data, 0, group != NULL ? expert : NULL, error);
    size_t t;
    for (t = 0; status == MOE_OK && t < data->n; t++, group += hme->config.n_groups, expert += hme->all)
        status = moei_hme_return(moei_hme_sample(hme, data, t, group, expert), NULL, error);
    return status;
}

/* ---- hierarchical mixtures: training ---- */

/* A gate or an expert, fitted on its own, weighted by posteriors. Part 0 is the top gate; the
   groups' gates follow, then the experts. */
typedef struct moei_hme_part {
    double *weights;  /* [rows,d+1] */
    double *variance; /* of a gaussian expert, else NULL */
    size_t rows;
    size_t first, span; /* gate: row k's share of a sample is the sum of the span posteriors from
                           h[first + k span] on; expert: its share is h[first], span is 0 */
} moei_hme_part;

typedef struct moei_sums {
    double objective; /* log-likelihood, weighted by posteriors; of a gaussian expert minus half its
                         squared errors */
    double mass;      /* sum of posteriors */
} moei_sums;

static moei_hme_part moei_hme_part_of(const moe_hme *hme, size_t number) {
    moei_hme_part m = {hme->gate, NULL, (size_t)hme->config.n_groups, 0, hme->in_group};
    if (number == 0) return m;
    if (number <= m.rows) {
        m.first = (number - 1) * hme->in_group;
        m.weights = hme->gates + m.first * hme->row;
        m.rows = hme->in_group;
        m.span = 1;
        return m;
    }
    m.first = number - 1 - m.rows;
    m.weights = hme->experts + m.first * hme->width * hme->row;
    m.variance = hme->config.family == MOE_HME_GAUSSIAN ? hme->variances + m.first : NULL;
    m.rows = hme->width;
    m.span = 0;
    return m;
}

static double moei_sum(size_t n, const double *v) {
    double sum = 0.0;
    size_t i;
    for (i = 0; i < n; i++) sum += v[i];
    return sum;
}

/* Adds sample t with posteriors h [G,E] to *sums and leaves d objective / d output in hme->outputs
   from..to-1. Returns the curvature along the last of them: the mass for squares, the mass times p
   (1 - p) for softmax, at least 2^-16 of the mass, which bounds the step of a sharp gate. */
static double moei_hme_part_sample(moe_hme *hme, const moei_hme_part *m, const moe_data *data, const double *h,
                                   size_t t, size_t from, size_t to, moei_sums *sums) {
    double mass = moei_sum(m->span > 0 ? m->rows * m->span : 1, h + m->first), least = mass / 65536.0;
    const moe_real *x = data->x + t * (hme->row - 1);
    double total, curvature = mass, *o = hme->outputs;
    double share, p;
    moei_lse lse = moei_lse_empty;
    size_t i;
    if (!(mass > 0.0)) return 0.0;
    sums->mass += mass;
    for (i = 0; i < m->rows; i++) {
        o[i] = moei_hme_dot(hme, m->weights + i * hme->row, x);
        if (m->variance == NULL) moei_lse_add(&lse, o[i]);
    }
    total = m->variance == NULL ? moei_lse_value(&lse) : 0.0;
    for (i = 0; i < m->rows; i++) {
        o[i] -= m->variance != NULL ? (double)data->targets[t * m->rows + i] : total;
        if (m->variance != NULL) {
            sums->objective -= 0.5 * mass * o[i] * o[i];
            o[i] *= -mass;
            continue;
        }
        share = m->span > 0 ? moei_sum(m->span, h + m->first + i * m->span) : (size_t)data->labels[t] == i ? mass : 0.0;
        sums->objective += share * o[i];
        if (i < from || i >= to) continue;
        p = exp(o[i]);
        o[i] = share - mass * p;
        curvature = mass * p * (1.0 - p);
    }
    return curvature > least ? curvature : least;
}

/* Sums over all samples. For rows from..to-1 (possibly none) hme->gradient [rows,d+1] receives
   their gradients, and the lower half of hme->normal the sum of curvature (x, 1) (x, 1)^T along the
   last row, which for squares is the same for all rows. */
static moei_sums moei_hme_part_pass(moe_hme *hme, const moei_hme_part *m, const moe_data *data, const double *h,
                                    size_t from, size_t to) {
    moei_sums sums = {0.0, 0.0};
    size_t t, k, a, b;
    memset(hme->gradient + from * hme->row, 0, (to - from) * hme->row * sizeof(double));
    if (to > from) memset(hme->normal, 0, hme->row * hme->row * sizeof(double));
    for (t = 0; t < data->n; t++, h += hme->all) {
        const moe_real *x = data->x + t * (hme->row - 1);
        double curvature = moei_hme_part_sample(hme, m, data, h, t, from, to, &sums);
        for (a = 0; to > from && curvature > 0.0 && a < hme->row; a++) {
            double x_a = a + 1 < hme->row ? (double)x[a] : 1.0;
            for (k = from; k < to; k++) hme->gradient[k * hme->row + a] += hme->outputs[k] * x_a;
            for (b = 0; b <= a; b++) hme->normal[a * hme->row + b] += curvature * x_a * (b < a ? (double)x[b] : x_a);
        }
    }
    return sums;
}

/* Replaces A, in the lower half of a [n,n], by L with L L^T = A + 1e-10 diag(A); returns 0 when
   that fails. An input that is always 0 gets a 1 on the diagonal. */
static int moei_cholesky(size_t n, double *a) {
    size_t i, j, k;
    for (i = 0; i < n; i++)
        for (j = 0; j <= i; j++) {
            double sum = a[i * n + j];
            if (i == j) sum = sum > 0.0 ? sum * (1.0 + 1e-10) : 1.0;
            for (k = 0; k < j; k++) sum -= a[i * n + k] * a[j * n + k];
            if (i > j) a[i * n + j] = sum / a[j * n + j];
            else if (sum > 0.0) a[i * n + i] = sqrt(sum);
            else return 0;
        }
    return 1;
}

/* v := A^-1 v; returns v . A^-1 v of the old v. */
static double moei_cholesky_solve(size_t n, const double *a, double *v) {
    double gain = 0.0;
    size_t i, k;
    for (i = 0; i < n; i++) {
        for (k = 0; k < i; k++) v[i] -= a[i * n + k] * v[k];
        v[i] /= a[i * n + i];
        gain += v[i] * v[i];
    }
    for (i = n; i-- > 0;) {
        for (k = i + 1; k < n; k++) v[i] -= a[k * n + i] * v[k];
        v[i] /= a[i * n + i];
    }
    return gain;
}

/* One Newton step of rows from..to-1: least squares for the change of their weights, halved until
   the objective does not fall. Along one row a softmax has at most 1/4 of the mass as curvature
   (Boehning 1992), and the curvature used is at least 2^-16 of it, so 2^-14 of the step always
   suffices. Returns the sums after the step. */
static moei_sums moei_hme_part_improve(moe_hme *hme, const moei_hme_part *m, const moe_data *data, const double *h,
                                       size_t from, size_t to) {
    moei_sums before = moei_hme_part_pass(hme, m, data, h, from, to), after;
    double *weights = m->weights + from * hme->row, *step = hme->gradient + from * hme->row;
    double gain = 0.0, scale;
    size_t i, count = (to - from) * hme->row;
    if (!moei_cholesky(hme->row, hme->normal)) return before;
    for (i = 0; i < count; i += hme->row) gain += moei_cholesky_solve(hme->row, hme->normal, step + i);
    if (!(gain > 1e-15 * fabs(before.objective))) return before;
    memcpy(hme->best, weights, count * sizeof(double));
    for (scale = 1.0; scale > 5e-5; scale *= 0.5) {
        for (i = 0; i < count; i++) weights[i] = hme->best[i] + scale * step[i];
        after = moei_hme_part_pass(hme, m, data, h, 0, 0);
        if (after.objective >= before.objective) return after;
    }
    memcpy(weights, hme->best, count * sizeof(double));
    return before;
}

static void moei_hme_part_variance(moe_hme *hme, const moei_hme_part *m, double variance) {
    double least = (double)hme->config.min_variance;
    if (m->variance != NULL && !(hme->config.variance > 0))
        *m->variance = variance > least ? variance : least;
}

/* The M-step of one part: squares are solved directly, a softmax row by row, in several rounds. */
static void moei_hme_part_maximize(moe_hme *hme, const moei_hme_part *m, const moe_data *data, const double *h) {
    moei_sums sums;
    size_t i;
    if (m->variance != NULL) {
        sums = moei_hme_part_improve(hme, m, data, h, 0, m->rows);
        if (sums.mass > 1e-250) moei_hme_part_variance(hme, m, -2.0 * sums.objective / (sums.mass * (double)m->rows));
        return;
    }
    for (i = 0; i < (size_t)hme->config.steps * m->rows; i++)
        (void)moei_hme_part_improve(hme, m, data, h, i % m->rows, i % m->rows + 1);
}

/* One step along the gradient of the mean log-likelihood. */
static void moei_hme_part_ascend(moe_hme *hme, const moei_hme_part *m, const moe_data *data, const double *h,
                                 double rate) {
    moei_sums sums = moei_hme_part_pass(hme, m, data, h, 0, m->rows);
    double over = m->variance != NULL ? 1.0 / *m->variance : 1.0;
    size_t i;
    for (i = 0; i < m->rows * hme->row; i++) m->weights[i] += rate * over * hme->gradient[i];
    if (m->variance != NULL)
        moei_hme_part_variance(hme, m,
                               *m->variance * exp(rate * (-sums.objective * over - 0.5 * sums.mass * (double)m->rows)));
}

/* The E-step; also copies the parameters, so that the step can be undone. */
static moe_status moei_hme_begin(moe_hme *hme, const moe_data *data, double *h, double *before, moe_error *error) {
    moe_status status = moei_hme_check_data(hme, data, 1, h, error);
    if (status == MOE_OK) status = moei_hme_return(moei_hme_expect(hme, data, h), before, error);
    if (status == MOE_OK) memcpy(hme->kept, hme->parameters, hme->n_parameters * sizeof(double));
    return status;
}

/* Restores the copy unless the result is good and finite. */
static int moei_hme_keep_or_undo(moe_hme *hme, int good) {
    size_t i;
    for (i = 0; i < hme->n_parameters; i++) good = good && fabs(hme->parameters[i]) <= 1e308;
    if (!good) memcpy(hme->parameters, hme->kept, hme->n_parameters * sizeof(double));
    return good;
}

static size_t moei_hme_parts(const moe_hme *hme) { return 1 + (size_t)hme->config.n_groups + hme->all; }

moe_status moe_hme_em(moe_hme *hme, const moe_data *data, double *h, double *log_likelihood, moe_error *error) {
    double before = 0.0, after; /* 0 silences gcc -O3, which does not see that begin sets it */
    size_t i;
    moe_status status = moei_hme_begin(hme, data, h, &before, error);
    if (status != MOE_OK) return status;
    for (i = 0; i < moei_hme_parts(hme); i++) {
        const moei_hme_part m = moei_hme_part_of(hme, i);
        moei_hme_part_maximize(hme, &m, data, h);
    }
    after = moei_hme_expect(hme, data, NULL);
    if (!moei_hme_keep_or_undo(hme, after >= before)) after = before;
    if (log_likelihood != NULL) *log_likelihood = after;
    return MOE_OK;
}

moe_status moe_hme_gradient(moe_hme *hme, const moe_data *data, moe_real rate, double *h, double *log_likelihood,
                            moe_error *error) {
    double before = 0.0;
    size_t i;
    moe_status status = moei_hme_begin(hme, data, h, &before, error);
    if (status != MOE_OK) return status;
    if (!moe_is_finite(rate))
        return moei_error(error, MOE_ERR_ARGUMENT, "rate = %g: must be a finite number", (double)rate);
    for (i = 0; data->n > 0 && i < moei_hme_parts(hme); i++) {
        const moei_hme_part m = moei_hme_part_of(hme, i);
        moei_hme_part_ascend(hme, &m, data, h, (double)rate / (double)data->n);
    }
    if (!moei_hme_keep_or_undo(hme, 1))
        return moei_error(error, MOE_ERR_NONFINITE, "rate = %g: a parameter would not be finite", (double)rate);
    if (log_likelihood != NULL) *log_likelihood = before;
    return MOE_OK;
}

/* ---- modular networks ---- */

static moe_status moei_modular_layout(moe_modular *m, moei_layout *l) {
    const moe_net *net = m->trainer->net;
    size_t n = (size_t)m->trainer->config.batch, experts = 0, i;
    moe_status status = moe_net_work_size(net, n, 1, &m->net_size);
    if (status != MOE_OK) return status;
    for (i = 0, m->n_mixtures = 0; i < net->n_modules; i++)
        if (net->modules[i].kind == MOE_MODULE_MIXTURE) {
            experts += (size_t)net->modules[i].layer.config.router.n_experts;
            m->n_mixtures++;
        }
    if (!moei_mul(n, experts, &m->n_teacher)) return MOE_ERR_OVERFLOW;
    m->teacher = moei_take_reals(l, m->n_teacher, 1);
    m->candidate = (int32_t *)moei_take(l, n, m->n_mixtures * sizeof(int32_t));
    m->best = (double *)moei_take(l, n, sizeof(double));
    m->drawn = (double *)moei_take(l, n, sizeof(double));
    m->changed = (unsigned char *)moei_take(l, n, 1);
    m->sequences = (int32_t *)moei_take(l, n + 1, sizeof(int32_t));
    m->net_work = moei_take(l, m->net_size, 1);
    return l->overflow ? MOE_ERR_OVERFLOW : MOE_OK;
}

/* Checks that the trainer's network satisfies the conditions of moe_modular. */
static moe_status moei_modular_check(const moe_trainer *trainer, moe_error *error) {
    const moe_net *net = trainer->net;
    size_t i;
    if (net->transport != NULL)
        return moei_error(error, MOE_ERR_UNSUPPORTED,
                          "a modular network runs in one process: net.transport must be NULL");
    for (i = 0; i < net->n_modules; i++) {
        const moe_router_config *c = &net->modules[i].layer.config.router;
        int one = c->select == MOE_SELECT_SAMPLE && c->top_k == 1 && c->k_end <= 1;
        if (one) one = moei_max_choices(c) == 1; /* those of switch_from */
        if (net->modules[i].kind != MOE_MODULE_MIXTURE) continue;
        if (!one || c->student || !(c->loss_distill > 0))
            return moei_error(error, MOE_ERR_CONFIG,
                              "module %z (mixture): a modular network needs select = sample, top_k = 1, no "
                              "switch_from that takes more, and loss_distill without student",
                              i);
    }
    return MOE_OK;
}

moe_status moe_modular_init(moe_modular *modular, moe_trainer *trainer, moe_error *error) {
    moei_layout l = moei_layout_begin(NULL);
    moe_modular made;
    moe_status status;
    if (modular == NULL || trainer == NULL || trainer->net == NULL)
        return moei_error(error, MOE_ERR_ARGUMENT, "modular and trainer must not be NULL");
    status = moei_modular_check(trainer, error);
    if (status != MOE_OK) return status;
    memset(&made, 0, sizeof made);
    made.trainer = trainer;
    status = moei_modular_layout(&made, &l);
    if (status != MOE_OK)
        return moei_error(error, status, "batch = %d: %s", trainer->config.batch, moe_status_text(status));
    if (made.n_mixtures == 0) return moei_error(error, MOE_ERR_CONFIG, "the network has no MoE layer");
    made.memory_size = l.used;
    made.memory = moei_alloc(&trainer->net->allocator, made.memory_size, 1);
    if (made.memory == NULL)
        return moei_error(error, MOE_ERR_MEMORY, "no memory for a workspace of %z bytes", made.memory_size);
    l = moei_layout_begin(made.memory);
    (void)moei_modular_layout(&made, &l);
    *modular = made;
    return MOE_OK;
}

void moe_modular_free(moe_modular *modular) {
    if (modular == NULL || modular->memory == NULL) return;
    moei_free(&modular->trainer->net->allocator, modular->memory, modular->memory_size);
    memset(modular, 0, sizeof *modular);
}

/* The value of each sample's choices: scores[t] = -loss + sum over layers of ln p(choice). */
static moe_status moei_modular_scores(moe_modular *m, const moe_data *batch, const moe_net_pass *pass, double *scores) {
    const moe_net *net = m->trainer->net;
    int criterion = m->trainer->config.criterion;
    size_t i, t, at = 0, width = (size_t)net->d_out;
    for (t = 0; t < batch->n; t++) {
        moe_data row = moei_data_part(net, batch, t, 1);
        size_t counted = moei_counted(criterion, &row);
        scores[t] = -(double)moei_criterion(criterion, net, &row, counted, pass->y + t * width, NULL);
        if (!(scores[t] > -MOEI_HUGE)) return MOE_ERR_NONFINITE;
    }
    for (i = 0; i < net->n_modules; i++) {
        const moe_routing *r = moe_net_routing(net, pass, i);
        for (t = 0; r != NULL && t < batch->n; t++, at++) {
            int32_t choice = r->n_choices[t] > 0 ? r->choices[t] : -1;
            double p = choice >= 0 ? (double)r->probabilities[t * r->n_experts + (size_t)choice] : 0.0;
            m->candidate[at] = choice;
            scores[t] += choice < 0 ? -MOEI_HUGE : log(p > 1e-300 ? p : 1e-300); /* none is never kept */
        }
    }
    return MOE_OK;
}

/* A forward pass with the choices `forced`, or (NULL) with drawn ones. m->candidate receives the
   choices, scores [n] the value of each sample. */
static moe_status moei_modular_pass(moe_modular *m, const moe_data *batch, const int32_t *forced, double *scores) {
    moe_net_pass pass;
    moe_call call = moei_data_call(batch, m->sequences);
    moe_status status;
    call.training = 1;
    call.rng = &m->trainer->rng;
    call.given = forced;
    call.teacher = m->teacher;
    status = moe_net_forward(m->trainer->net, &call, m->net_work, m->net_size, &pass);
    return status == MOE_OK ? moei_modular_scores(m, batch, &pass, scores) : status;
}

/* The E-step: each sample keeps the best of its choices and the draws. */
static moe_status moei_modular_expect(moe_modular *m, const moe_data *batch, int draws, int32_t *choices) {
    size_t n = batch->n, t, i;
    int draw, known = 0, unknown = 0;
    moe_status status;
    for (i = 0; i < m->n_teacher; i++) m->teacher[i] = 0; /* this loss is ignored here */
    for (i = 0; i < n * m->n_mixtures; i++) {
        known |= choices[i] >= 0;
        unknown |= choices[i] < 0;
    }
    if (unknown && draws < 1) return MOE_ERR_ARGUMENT;
    for (t = 0; t < n; t++) m->best[t] = -MOEI_HUGE;
    memset(m->changed, 0, n);
    if (known && (status = moei_modular_pass(m, batch, choices, m->best)) != MOE_OK) return status;
    for (draw = 0; draw < draws; draw++) {
        status = moei_modular_pass(m, batch, NULL, m->drawn);
        if (status != MOE_OK) return status;
        for (t = 0; t < n; t++) {
            if (!(m->drawn[t] > m->best[t])) continue;
            m->best[t] = m->drawn[t];
            for (i = t; i < n * m->n_mixtures; i += n) {
                if (choices[i] != m->candidate[i]) m->changed[t] = 1;
                choices[i] = m->candidate[i];
            }
        }
    }
    return MOE_OK;
}

/* The assigned choices as the gates' teacher: 1 at the assigned module, 0 elsewhere. */
static void moei_modular_teach(moe_modular *m, size_t n, const int32_t *choices) {
    const moe_net *net = m->trainer->net;
    moe_real *teacher = m->teacher;
    size_t i, t;
    for (i = 0; i < m->n_teacher; i++) teacher[i] = 0;
    for (i = 0; i < net->n_modules; i++) {
        size_t experts = (size_t)net->modules[i].layer.config.router.n_experts;
        if (net->modules[i].kind != MOE_MODULE_MIXTURE) continue;
        for (t = 0; t < n; t++) teacher[t * experts + (size_t)*choices++] = MOEI_R(1.0);
        teacher += n * experts;
    }
}

moe_status moe_modular_step(moe_modular *modular, const moe_data *batch, int draws, int m_steps, int32_t *choices,
                            moe_modular_step_result *result, moe_error *error) {
    moe_modular *m = modular;
    moe_modular_step_result made;
    moe_data assigned;
    moe_call call;
    moe_status status;
    size_t t, changed = 0; /* a count, because a sum of fractions may round above 1 */
    int step;
    memset(&made, 0, sizeof made);
    memset(&call, 0, sizeof call);
    if (m == NULL || batch == NULL || choices == NULL || m->memory == NULL || draws < 0 || m_steps < 0)
        return moei_error(error, MOE_ERR_ARGUMENT,
                          "modular, batch and choices must not be NULL, draws and m_steps not negative");
    if (batch->n < 1 || batch->n > (size_t)m->trainer->config.batch)
        return moei_error(error, MOE_ERR_ARGUMENT, "n = %z: must be 1 to batch = %d", batch->n,
                          m->trainer->config.batch);
    status = moei_data_check(m->trainer->net, batch, m->trainer->config.criterion, error);
    if (status != MOE_OK) return status;
    for (t = 0; batch->call != NULL && batch->call->mask != NULL && t < batch->n; t++)
        if (batch->call->mask[t] == 0)
            return moei_error(error, MOE_ERR_ARGUMENT, "mask[%z] = 0: a modular network takes no padding", t);
    status = moei_modular_expect(m, batch, draws, choices);
    if (status != MOE_OK) return moei_error(error, status, "the E-step: %s", moe_status_text(status));
    for (t = 0; t < batch->n * m->n_mixtures; t++)
        if (choices[t] < 0)
            return moei_error(error, MOE_ERR_ARGUMENT, "sample %z: the gate of MoE layer %z chose no module",
                              t % batch->n, t / batch->n);
    for (t = 0; t < batch->n; t++) {
        made.log_likelihood += m->best[t] / (double)batch->n;
        changed += m->changed[t];
    }
    made.changed = (double)changed / (double)batch->n;
    moei_modular_teach(m, batch->n, choices);
    if (batch->call != NULL) call = *batch->call;
    call.given = choices;
    call.teacher = m->teacher;
    assigned = *batch;
    assigned.call = &call;
    for (step = 0; step < m_steps && status == MOE_OK; step++)
        status = moe_trainer_step(m->trainer, &assigned, &made.last, error);
    if (status == MOE_OK && result != NULL) *result = made;
    return status;
}

/* ---- consistency of two passes ---- */

/* With l = ln p - ln q the loss is sum (p - q) l / 2. Its derivative by a_j is
   (p_j (l_j - sum p l) + p_j - q_j) / 2, that by b_j the same with p and q exchanged. */
moe_real moe_consistency_loss(size_t n, size_t classes, const moe_real *a, const moe_real *b, moe_real *da,
                              moe_real *db) {
    moe_real share = n > 0 ? MOEI_R(0.5) / (moe_real)n : 0, sum = 0;
    size_t t, j;
    for (t = 0; t < n; t++) {
        const moe_real *va = a + t * classes, *vb = b + t * classes;
        moe_real lse_a = moe_log_sum_exp(classes, va), lse_b = moe_log_sum_exp(classes, vb);
        moe_real p_l = 0, q_l = 0;
        for (j = 0; j < classes; j++) {
            moe_real l = (va[j] - lse_a) - (vb[j] - lse_b);
            p_l += MOEI_F(exp)(va[j] - lse_a) * l;
            q_l += MOEI_F(exp)(vb[j] - lse_b) * l;
        }
        sum += p_l - q_l;
        for (j = 0; j < classes; j++) {
            moe_real p = MOEI_F(exp)(va[j] - lse_a), q = MOEI_F(exp)(vb[j] - lse_b);
            moe_real l = (va[j] - lse_a) - (vb[j] - lse_b);
            if (da != NULL) da[t * classes + j] = share * (p * (l - p_l) + p - q);
            if (db != NULL) db[t * classes + j] = share * (q * (q_l - l) + q - p);
        }
    }
    return sum * share;
}

#endif /* MOE_NO_TRAIN */
#endif /* MOE_IMPLEMENTATION */
