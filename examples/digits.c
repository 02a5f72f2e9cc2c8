/* Interpretability study: what experts learn of handwritten digits, method by method, and whether
   published claims hold here.
     cc -std=c99 -O2 -I. examples/digits.c -o digits -lm && ./digits
     (or: sh examples/run digits)

   Experts are small whole classifiers, a gate mixes their answers. Every method is a row of the
   table `methods`, every claim one of `claims`. A run is a method, a seed and a fold: the digits
   are put in an order that the seed decides and cut into five parts, part `fold` is held out, the
   part before it is for validation, the other three are trained on. What a method leaves open
   (`choices`) is chosen by the loss on the validation part; the held-out part is read once, by the
   net that was chosen.

   Sources: Jacobs, Jordan, Nowlan, Hinton 1991, Adaptive mixtures of local experts (the losses);
   Krishnamurthy, Watkins, Gaertner 2023, Improving expert specialization in mixture of experts
   (importance, similarity, dual temperature, attentive gate); Nielsen et al. 2025, Tight clusters
   make specialized experts (adaptive clustering); Goodfellow, Shlens, Szegedy 2015, Explaining and
   harnessing adversarial examples (FGSM); Madry et al. 2018, Towards deep learning models resistant
   to adversarial attacks (PGD). */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include "extras/moe_classic.h"
#include "report.h"
#include "statistics.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef _WIN32
#include <io.h>
#else
#include <unistd.h>
#endif

enum {
    PIXELS = 64, DIGITS = 10, FOLDS = 5, MAX_DIGITS = 2000, MAX_SAMPLES = 2 * MAX_DIGITS, MAX_EXPERTS = 20,
    MAX_CLASSES = 2 * DIGITS, HIDDEN = 8 /* units of an expert and of the gate */, CHOICES = 4, KEY = 128,
    MAX_RESULTS = 20000, MAX_SEEDS = 1000
};

static const char help[] =
    "digits [options]   trains classical mixtures of experts on handwritten digits and shows what the experts learned\n"
    "  --methods a,b     which methods (all of them)                  --list          lists methods, measures and "
    "claims\n"
    "  --seeds N         runs per method (3; claims: 20)              --first N       the first seed (1)\n"
    "  --experts N       5, 10 or 15 experts, 2 to 20 (5)             --epochs N      passes through the training "
    "digits (30)\n"
    "  --temperature T   of dual temperature, instead of choosing     --importance W  weight of that loss, instead of "
    "choosing\n"
    "  --tasks N         2: inverted digits too, as classes 10..19    --attack        the nets for attacks instead of "
    "the mixtures\n"
    "  --tables          prints the expert x class table of new runs  --csv FILE      appends each run; none there is "
    "repeated\n"
    "  --claims          runs what the claims need and judges them    --only a,b      these claims only\n"
    "  --check           a quick test of all this                     --data FILE     the digits "
    "(examples/data/digits.csv)\n" REPORT_HELP "An interrupted program (Ctrl-C) has its finished runs in the CSV and "
                                               "goes on from there. Another version: another CSV.\n";

/* ---- what is measured ---- */

enum {
    ERROR, H_B, H_E, INFORMATION, CHANCE, EXCESS, GATE_ERROR, EXPERT_ERROR, TRIVIAL_GATE, TRIVIAL_EXPERTS, USED, FGSM_1,
    FGSM_2, PGD_1, PGD_2, ATTACKED, VALIDATION, CHOICE, SECONDS, MEASURES
};

static const struct {
    const char *name, *about;
    int percent;
} measures[MEASURES] = {
    {"error", "share of the held-out samples that the model answers wrongly", 1},
    {"H_b", "mean entropy of the gate's p over one sample, in nats: 0 is decided", 0},
    {"H_e", "entropy of the mean of p, in nats: how evenly the experts are used", 0},
    {"I", "I(E;Y) in nats, E: the expert with the largest p, Y: the model's answer (not the label)", 0},
    {"I_chance", "its mean over all shuffles of Y", 0},
    {"I_excess", "I - I_chance", 0},
    {"gate_err", "share of samples where the model is wrong although some expert is right", 1},
    {"exp_err", "share of samples where no expert is right", 1},
    {"triv_gate", "1: one expert has the largest p for over 95 % of the samples", 0},
    {"triv_exp", "experts that answer one class only", 0},
    {"used", "experts with the largest p for more than 1/(2E) of the samples", 0},
    {"fgsm_1", "error under FGSM, budget 1/16 of the range of a pixel", 1},
    {"fgsm_2", "the same, 2/16", 1},
    {"pgd_1", "error under PGD of 10 steps, budget 1/16", 1},
    {"pgd_2", "the same, 2/16", 1},
    {"attacked", "mean of these four", 1},
    {"val_loss", "loss on the validation part", 0},
    {"choice", "which of the method's choices that loss chose, from 1", 0},
    {"seconds", "time of the run", 0}};

/* ---- methods ---- */

enum { END_TO_END = 0, BY_CLASS = 1, BY_SAMPLE = 2 }; /* what the experts are trained on */

enum { MIXTURES = 0, COLLAPSING = 1, ATTACKED_NETS = 2 };      /* which methods are run together */

typedef struct method {
    const char *name, *about;
    int criterion;                    /* MOE_CRITERION_ */
    /* the mixture: a preset and changes of it; of networks for attacks, the second mixture */
    const char *preset, *settings;
    const char *choices[CHOICES];     /* more settings, one of them by validation; none: as it is */
    int split, groups;                /* BY_CLASS: groups of classes, one group per expert in turn */
    int distil;                       /* 1: an ordinary gate then learns to choose as this one does */
    int family;
    int optimizer;                    /* MOE_OPTIMIZER_ */
    double rate;                      /* 0: 0.01 */
} method;

#define PLAIN .preset = "importance_gate", .settings = "loss_importance=0"
#define WIDE "loss_importance=0 d_ff=32 router_hidden=32" /* 32 units instead of 8 */
#define IMPORTANCE .choices = {"loss_importance=0.02", "loss_importance=0.1", "loss_importance=0.4"}
#define TEMPERATURE .choices = {"expert_temperature=2", "expert_temperature=4", "expert_temperature=8"}
#define SIMILARITY(same, diff) "loss_similarity_same=" #same " loss_similarity_diff=" #diff

static const method methods[] = {
    {"expectation", "-ln sum p_e softmax(o_e)[label]", MOE_CRITERION_EXPECTATION, PLAIN},
    {"pre_softmax", "-ln softmax(sum p_e o_e)[label]", MOE_CRITERION_CROSS_ENTROPY, PLAIN},
    {"stochastic", "sum p_e l_e, l_e the expert's own loss; the expert with the largest p answers",
     MOE_CRITERION_STOCHASTIC, PLAIN},
    {"jacobs", "-ln sum p_e exp(-l_e / 2); the expert with the largest p answers", MOE_CRITERION_JACOBS, PLAIN},
    {"importance", "expectation with the importance loss", MOE_CRITERION_EXPECTATION, .preset = "importance_gate",
     .settings = "", IMPORTANCE},
    {"dual", "expectation whose experts learn with p at a higher temperature", MOE_CRITERION_EXPECTATION,
     .preset = "dual_temperature", .settings = "loss_importance=0", TEMPERATURE},
    {"attentive", "importance with the attentive gate", MOE_CRITERION_EXPECTATION, .preset = "attentive_gate",
     .settings = "unbiased=1", IMPORTANCE},
    {"similarity", "expectation with the similarity loss", MOE_CRITERION_EXPECTATION, .preset = "similarity_gate",
     .settings = "", .choices = {SIMILARITY(0.1, 0.1), SIMILARITY(1, 1), SIMILARITY(1, 10)}},
    {"pairs", "experts trained on {0,1}, {2,3}, ..., then frozen; the gate learns", MOE_CRITERION_EXPECTATION, PLAIN,
     .split = BY_CLASS, .groups = 5},
    {"halves", "experts trained on {0-4} or {5-9}, then frozen; the gate learns", MOE_CRITERION_EXPECTATION, PLAIN,
     .split = BY_CLASS, .groups = 2},
    {"random", "experts trained on random shares of the digits, then frozen; the gate learns",
     MOE_CRITERION_EXPECTATION, PLAIN, .split = BY_SAMPLE},
    {"pairs_attentive", "pairs with the attentive gate", MOE_CRITERION_EXPECTATION, .preset = "attentive_gate",
     .settings = "loss_importance=0", .split = BY_CLASS, .groups = 5},
    {"pairs_distilled", "that gate distilled into an ordinary one", MOE_CRITERION_EXPECTATION,
     .preset = "attentive_gate", .settings = "loss_importance=0", .split = BY_CLASS, .groups = 5, .distil = 1},
    /* Plain settings whose gates often collapse, found with the seeds 1001 to 1008; the claims use
       others. */
    {"collapse", "expectation, 32 units, AdamW at 0.1", MOE_CRITERION_EXPECTATION, .preset = "importance_gate",
     .settings = WIDE, .family = COLLAPSING, .rate = 0.1},
    {"collapse_dual", "the same with dual temperature", MOE_CRITERION_EXPECTATION, .preset = "dual_temperature",
     .settings = WIDE, TEMPERATURE, .family = COLLAPSING, .rate = 0.1},
    {"stuck", "stochastic, 32 units, SGD at 0.1", MOE_CRITERION_STOCHASTIC, .preset = "importance_gate",
     .settings = WIDE, .family = COLLAPSING, .optimizer = MOE_OPTIMIZER_SGD, .rate = 0.1},
    {"stuck_dual", "the same with dual temperature", MOE_CRITERION_STOCHASTIC, .preset = "dual_temperature",
     .settings = WIDE, TEMPERATURE, .family = COLLAPSING, .optimizer = MOE_OPTIMIZER_SGD, .rate = 0.1},
    {"net", "for attacks: two MoE layers, the 2 best of E experts", MOE_CRITERION_CROSS_ENTROPY, .settings = "",
     .family = ATTACKED_NETS},
    {"net_ac", "its second one with adaptive clustering over the samples of the call", MOE_CRITERION_CROSS_ENTROPY,
     .settings = "input=adaptive_clustering ac_mode=paper", .family = ATTACKED_NETS},
    {"net_ac_running", "the same with averages kept from training", MOE_CRITERION_CROSS_ENTROPY,
     .settings = "input=adaptive_clustering ac_mode=running", .family = ATTACKED_NETS}};

enum { METHODS = sizeof methods / sizeof *methods };

static const method *find_method(const char *name) {
    for (int i = 0; i < METHODS; i++)
        if (strcmp(methods[i].name, name) == 0) return &methods[i];
    return NULL;
}

/* ---- options ---- */

/* One run; together with the method this is its key in the CSV. */
typedef struct setting {
    long experts, tasks, epochs, seed, fold;
    double temperature, importance; /* 0: chosen by validation */
} setting;

static setting common = {5, 1, 30, 1, 0, 0, 0};
static long n_seeds, first_seed = 1;
static const char *data_path, *csv_path, *wanted_methods, *wanted_claims;
static int attack, tables, judge, check;
static volatile sig_atomic_t stopped;

static void on_interrupt(int signal_number) {
    (void)signal_number;
    stopped = 1;
}

static int fail(const char *what, const char *why) {
    fprintf(stderr, "digits: %s: %s\n", what, why);
    return 1;
}

/* Flushes the output; fails if it could not be written. */
static int finish(void) { return fflush(stdout) != 0 || ferror(stdout) ? fail("the output", "cannot be written") : 0; }

static void list(void);

static const struct option {
    const char *name;
    long *whole;
    double *real;
    const char **text;
    int *flag;
    double least, most;
} options[] = {
    {"--seeds", .whole = &n_seeds, .least = 1, .most = MAX_SEEDS},
    {"--first", .whole = &first_seed, .least = 1, .most = 1000000},
    {"--experts", .whole = &common.experts, .least = 2, .most = MAX_EXPERTS},
    {"--epochs", .whole = &common.epochs, .least = 1, .most = 10000},
    {"--tasks", .whole = &common.tasks, .least = 1, .most = 2},
    {"--temperature", .real = &common.temperature, .least = 1, .most = 1000},
    {"--importance", .real = &common.importance, .least = 1e-6, .most = 1000},
    {"--methods", .text = &wanted_methods},
    {"--only", .text = &wanted_claims},
    {"--csv", .text = &csv_path},
    {"--data", .text = &data_path},
    {"--report", .text = &report_path},
    {"--attack", .flag = &attack},
    {"--tables", .flag = &tables},
    {"--claims", .flag = &judge},
    {"--check", .flag = &check}};

/* Parses the value of an option. */
static int read_value(const struct option *o, const char *value) {
    char *rest;
    double number = strtod(value, &rest);
    if (*value == '\0') return fail(o->name, "its value is missing; -h explains");
    if (o->text != NULL) {
        *o->text = value;
        return 0;
    }
    if (*rest != '\0' || !(number >= o->least && number <= o->most) ||
        (o->whole != NULL && number > (double)(long)number)) {
        fprintf(stderr, "digits: %s %s: must be a%s number from %g to %g\n", o->name, value, o->whole ? " whole" : "",
                o->least, o->most);
        return 1;
    }
    if (o->whole != NULL) *o->whole = (long)number;
    else *o->real = number;
    return 0;
}

static int read_options(int count, char **words) {
    for (int i = 1; i < count; i++) {
        const struct option *o = options, *end = options + sizeof options / sizeof *options;
        if (strcmp(words[i], "-h") == 0 || strcmp(words[i], "--help") == 0) exit(fputs(help, stdout) < 0);
        if (strcmp(words[i], "--list") == 0) {
            list();
            exit(0);
        }
        while (o < end && strcmp(o->name, words[i]) != 0) o++;
        if (o == end) return fail(words[i], "no such option; -h explains");
        if (o->flag != NULL) {
            *o->flag = 1;
            continue;
        }
        i++;
        if (read_value(o, i < count ? words[i] : "")) return 1;
    }
    return 0;
}

/* Whether name is in a list "a,b". */
static int listed(const char *names, const char *name) {
    size_t length = strlen(name);
    for (const char *at = names; (at = strstr(at, name)) != NULL; at += length)
        if ((at == names || at[-1] == ',') && (at[length] == ',' || at[length] == '\0')) return 1;
    return 0;
}

/* ---- the digits ---- */

static moe_real gray[MAX_DIGITS * PIXELS], sample_x[MAX_SAMPLES * PIXELS], part_x[MAX_SAMPLES * PIXELS];
static int32_t written[MAX_DIGITS], sample_y[MAX_SAMPLES], part_y[MAX_SAMPLES];
static size_t n_digits;
#define USUAL_DIGITS 0xbfb62887ul
static unsigned long data_mark; /* a hash of all digits, USUAL_DIGITS for those of examples/data */

static int read_digits(void) {
    FILE *f = fopen(data_path, "rb");
    char line[1024];
    int unread;
    if (f == NULL) return fail(data_path, "cannot be opened");
    data_mark = 2166136261ul;
    for (n_digits = 0; fgets(line, sizeof line, f) != NULL && n_digits < MAX_DIGITS; n_digits++) {
        char *at = line;
        for (int i = 0; i <= PIXELS; i++) {
            char *end;
            long value = strtol(at, &end, 10);
            if (end == at || value < 0 || value > (i < PIXELS ? 16 : DIGITS - 1) || (*end != ',' && i < PIXELS)) {
                fprintf(stderr, "digits: %s:%d: column %d is not an integer\n", data_path,
                        (int)n_digits + 1, i + 1);
                fclose(f);
                return 1;
            }
            data_mark = ((data_mark ^ (unsigned long)value) * 16777619ul) & 0xfffffffful;
            if (i < PIXELS) gray[n_digits * PIXELS + (size_t)i] = (moe_real)value / 16;
            else written[n_digits] = (int32_t)value;
            at = end + 1;
        }
    }
    unread = ferror(f);
    fclose(f);
    if (unread) return fail(data_path, "cannot be read");
    return n_digits < 100 || n_digits == MAX_DIGITS ? fail(data_path, "100 to 1999 digits are needed") : 0;
}

typedef struct parts {
    moe_data train, validation, test;
} parts;

static moe_data samples(size_t from, size_t to) {
    moe_data data = {0};
    data.n = to - from;
    data.x = sample_x + from * PIXELS;
    data.labels = sample_y + from;
    return data;
}

/* A digit and, with two tasks, its inverse are always in the same part. */
static parts cut(const setting *s) {
    static size_t order[MAX_DIGITS];
    size_t n = n_digits, fold = (size_t)s->fold;
    size_t tasks = (size_t)s->tasks, end = (fold + 1) * n / FOLDS;
    size_t held = end - fold * n / FOLDS;
    moe_rng rng;
    parts p;
    moe_rng_seed(&rng, (uint64_t)s->seed + 7000);
    for (size_t i = 0; i < n; i++) {
        size_t place = (size_t)moe_rng_below(&rng, i + 1);
        order[i] = order[place];
        order[place] = i;
    }
    for (size_t i = 0; i < n * tasks; i++) {
        size_t digit = order[(i / tasks + end) % n], inverse = i % tasks; /* the held-out part comes last */
        for (size_t j = 0; j < PIXELS; j++)
            sample_x[i * PIXELS + j] = inverse ? 1 - gray[digit * PIXELS + j] : gray[digit * PIXELS + j];
        sample_y[i] = written[digit] + (int32_t)inverse * DIGITS;
    }
    p.train = samples(0, (n - 2 * held) * tasks);
    p.validation = samples((n - 2 * held) * tasks, (n - held) * tasks);
    p.test = samples((n - held) * tasks, n * tasks);
    return p;
}

/* ---- training ---- */

static int keep_going(void *ctx, const moe_progress *p) {
    (void)ctx;
    (void)p;
    return stopped;
}

static moe_train_config training(const method *m, const setting *s) {
    moe_train_config t = {0};
    t.criterion = m->criterion;
    t.epochs = (int)s->epochs;
    t.batch = 32;
    t.seed = (uint64_t)s->seed;
    t.optimizer = m->optimizer;
    t.rate = (moe_real)(m->rate > 0 ? m->rate : 0.01);
    t.final_rate = (moe_real)0.05;
    t.progress = keep_going;
    return t;
}

/* A network whose only module is an MoE layer with that many experts. */
static moe_status build_mixture(moe_net *net, const char *preset, int experts, const char *settings, const char *more,
                                const setting *s, moe_error *error) {
    moe_layer_config c;
    moe_status status = moe_layer_preset(preset, &c, error);
    c.router.n_experts = experts;
    c.router.router_hidden = HIDDEN;
    c.d_ff = HIDDEN;
    c.d_out = (int)s->tasks * DIGITS;
    if (status == MOE_OK) status = moe_fields_apply(moe_layer_fields(), &c, settings, error);
    if (status == MOE_OK) status = moe_fields_apply(moe_layer_fields(), &c, more, error);
    if (status != MOE_OK) return status;
    moe_net_init(net, PIXELS, 0, NULL);
    net->mixture_losses = moe_classic_losses();
    moe_net_mixture(net, &c);
    return moe_net_build(net, 1, (uint64_t)s->seed, error);
}

/* The network for attacks. It ends with a linear layer, so that both MoE layers are hidden layers.
   losses 0: the same network without router losses, so that its gradient is that of the criterion
   only. */
static moe_status build_net(moe_net *net, const method *m, int losses, const setting *s, moe_error *error) {
    moe_layer_config c = {0};
    moe_status status;
    c.router.n_experts = (int)s->experts;
    c.d_ff = 16;
    if (losses) c.router.loss_balance = (moe_real)0.05;
    moe_net_init(net, PIXELS, 0, NULL);
    moe_net_linear(net, 32);
    moe_net_layer_norm(net);
    moe_net_mixture(net, &c);
    moe_net_residual(net, 2);
    if ((status = moe_fields_apply(moe_layer_fields(), &c, m->settings, error)) != MOE_OK) return status;
    moe_net_mixture(net, &c);
    moe_net_residual(net, 1);
    moe_net_layer_norm(net);
    moe_net_linear(net, (int)s->tasks * DIGITS);
    return moe_net_build(net, 1, (uint64_t)s->seed, error);
}

/* Copies all tensors of `from` whose names begin with prefix and that also exist in `to`. */
static void copy_tensors(moe_net *to, const moe_net *from, const char *prefix) {
    for (size_t i = 0; i < from->n_tensors; i++) {
        moe_tensor t;
        if (moe_net_find(to, from->tensors[i].name, &t) != MOE_OK || strncmp(t.name, prefix, strlen(prefix)) != 0)
            continue;
        memcpy(t.data, from->tensors[i].data, t.count * sizeof *t.data);
    }
}

static void freeze_experts(moe_net *net) {
    for (size_t i = 0; i < net->n_tensors; i++)
        if (strncmp(net->tensors[i].name, "0.experts.", 10) == 0) net->tensors[i].flags |= MOE_PARAM_FROZEN;
}

/* Whether expert e learns from sample i of the training part. */
static int is_taught(const method *m, const setting *s, const moe_data *train, size_t i, long e) {
    if (m->split == BY_SAMPLE) return (long)i / s->tasks % s->experts == e;
    return train->labels[i] % DIGITS * m->groups / DIGITS == e % m->groups;
}

/* Pre-trains every expert of net alone as a classifier on its part of the samples; experts with the
   same classes start differently. */
static moe_status pretrain(moe_net *net, const method *m, const setting *s, const moe_data *train, moe_error *error) {
    moe_train_config t = training(m, s);
    moe_status status = MOE_OK;
    t.criterion = MOE_CRITERION_CROSS_ENTROPY;
    for (long e = 0; e < s->experts && status == MOE_OK; e++) {
        setting own = *s;
        moe_net alone = {0};
        moe_data share = {0};
        share.x = part_x;
        share.labels = part_y;
        for (size_t i = 0; i < train->n; i++) {
            if (!is_taught(m, s, train, i, e)) continue;
            memcpy(part_x + share.n * PIXELS, train->x + i * PIXELS, PIXELS * sizeof *part_x);
            part_y[share.n++] = train->labels[i];
        }
        own.seed = s->seed * 1000 + e;
        status = build_mixture(&alone, "importance_gate", 1, "loss_importance=0 untrained=1", "", &own, error);
        if (status == MOE_OK) status = moe_fit(&alone, &share, NULL, &t, error);
        for (size_t i = 0; i < net->n_tensors && status == MOE_OK; i++) {
            const moe_tensor *to = &net->tensors[i];
            moe_tensor from;
            if (strncmp(to->name, "0.experts.", 10) != 0 || moe_net_find(&alone, to->name, &from) != MOE_OK) continue;
            memcpy(to->data + (size_t)e * from.count, from.data, from.count * sizeof *to->data);
        }
        moe_net_free(&alone);
    }
    freeze_experts(net);
    return status;
}

/* Runs the MoE layer of a network on data and keeps all experts' outputs; free *work after using
   the pass. */
static moe_status run_mixture(const moe_net *net, const moe_data *data, void **work, moe_layer_pass *pass) {
    const moe_layer *layer = &net->modules[0].layer;
    moe_call call = {0};
    size_t bytes, outputs = data->n * (size_t)net->d_out * sizeof(moe_real);
    moe_status status = moe_layer_work_size(layer, data->n, 1, &bytes);
    call.n_tokens = data->n;
    call.x = data->x;
    call.keep = 1;
    *work = status == MOE_OK ? malloc(outputs + bytes) : NULL;
    if (*work == NULL) return status == MOE_OK ? MOE_ERR_MEMORY : status;
    return moe_layer_forward(layer, &call, (moe_real *)*work, (char *)*work + outputs, bytes, pass);
}

/* Replaces net by one with an ordinary gate, trained on the logits of net's gate only, and the same
   experts. */
static moe_status distil(moe_net *net, const method *m, const setting *s, const moe_data *train, moe_error *error) {
    static moe_real lessons[MAX_SAMPLES * MAX_EXPERTS];
    moe_train_config t = training(m, s);
    moe_net pupil = {0};
    moe_trainer trainer = {0};
    moe_layer_pass pass;
    moe_call call = {0};
    size_t experts = (size_t)s->experts;
    void *work;
    moe_status status = run_mixture(net, train, &work, &pass);
    if (status == MOE_OK) memcpy(lessons, pass.routing.logits, train->n * experts * sizeof *lessons);
    free(work);
    if (status != MOE_OK) return status;
    /* The task's own loss still reaches the gate through the criterion; 100 makes it small beside
       the teacher's. */
    status = build_mixture(&pupil, "importance_gate", (int)experts,
                           "loss_importance=0 loss_distill=100 distill=ce_soft", "", s, error);
    copy_tensors(&pupil, net, "0.experts.");
    freeze_experts(&pupil);
    if (status == MOE_OK) status = moe_trainer_init(&trainer, &pupil, &t, error);
    for (long epoch = 0; epoch < s->epochs && status == MOE_OK && !stopped; epoch++) {
        trainer.rate = t.rate * (moe_real)(s->epochs - epoch) / (moe_real)s->epochs;
        for (size_t at = 0; at < train->n && status == MOE_OK; at += (size_t)t.batch) {
            /* the samples are already shuffled */
            moe_data batch = *train;
            batch.n = train->n - at < (size_t)t.batch ? train->n - at : (size_t)t.batch;
            batch.x += at * PIXELS;
            batch.labels += at;
            call.teacher = lessons + at * experts;
            batch.call = &call;
            status = moe_trainer_step(&trainer, &batch, NULL, error);
        }
    }
    moe_trainer_free(&trainer);
    moe_net_free(net);
    *net = pupil;
    return status == MOE_OK && stopped ? MOE_ERR_STOPPED : status;
}

/* Trains the method with one of its choices. */
static moe_status train_once(const method *m, const char *choice, const setting *s, const parts *p, moe_net *net,
                             moe_error *error) {
    moe_train_config t = training(m, s);
    moe_status status = m->family == ATTACKED_NETS
                            ? build_net(net, m, 1, s, error)
                            : build_mixture(net, m->preset, (int)s->experts, m->settings, choice, s, error);
    if (status == MOE_OK && m->split) status = pretrain(net, m, s, &p->train, error);
    if (status == MOE_OK) status = moe_fit(net, &p->train, NULL, &t, error);
    if (status == MOE_OK && m->distil) status = distil(net, m, s, &p->train, error);
    return status;
}

/* The choices of a method, or the one set by an option. */
static size_t choices_of(const method *m, const setting *s, char texts[CHOICES][80]) {
    size_t n = 0;
    for (; n < CHOICES && m->choices[n] != NULL; n++) snprintf(texts[n], 80, "%s", m->choices[n]);
    if (n == 0) texts[0][0] = '\0';
    else if (s->temperature > 0 && strncmp(texts[0], "expert_t", 8) == 0) {
        n = 1;
        snprintf(texts[0], 80, "expert_temperature=%g", s->temperature);
    } else if (s->importance > 0 && strncmp(texts[0], "loss_im", 7) == 0) {
        n = 1;
        snprintf(texts[0], 80, "loss_importance=%g", s->importance);
    }
    return n > 0 ? n : 1;
}

/* Trains with each choice; *net is the network with the lowest loss on the validation part. */
static moe_status train_method(const method *m, const setting *s, const parts *p, moe_net *net, double *value,
                               moe_error *error) {
    char texts[CHOICES][80];
    size_t n = choices_of(m, s, texts);
    moe_status status = MOE_OK;
    for (size_t i = 0; i < n && status == MOE_OK; i++) {
        moe_net trained = {0};
        moe_evaluation seen = {0};
        status = train_once(m, texts[i], s, p, &trained, error);
        if (status == MOE_OK) status = moe_evaluate(&trained, &p->validation, m->criterion, &seen, error);
        if (status == MOE_OK && (i == 0 || (double)seen.loss < value[VALIDATION])) {
            moe_net old = *net;
            *net = trained;
            trained = old;
            value[VALIDATION] = (double)seen.loss;
            value[CHOICE] = (double)(i + 1);
        }
        moe_net_free(&trained);
    }
    return status;
}

/* ---- measuring ---- */

static int32_t largest(size_t n, const moe_real *v) {
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (v[i] > v[best]) best = i;
    return (int32_t)best;
}

static void show_table(const moe_report *r) {
    printf("  expert x the model's answer, experts by their largest p:\n  expert");
    for (size_t c = 0; c < r->n_classes; c++) printf("%5d", (int)c);
    printf("    all\n");
    for (size_t e = 0; e < r->n_experts; e++) {
        printf("%8d", (int)e);
        for (size_t c = 0; c < r->n_classes; c++) printf("%5.0f", r->first_classes[e * r->n_classes + c]);
        printf("%7.0f\n", r->first[e]);
    }
}

/* The same as a figure, for a method's first run in this program. */
static void report_classes(const method *m, const moe_report *r) {
    static const method *last;
    char title[80];
    moe_figure *f;
    if (m == last) return;
    last = m;
    snprintf(title, sizeof title, "%s: experts and answers", m->name);
    f = report_take(moe_figure_classes(r), title);
    f->values = report_numbers(r->first_classes, r->n_experts * r->n_classes);
    f->column_label = "the model's answer";
    f->caption = m->about;
}

/* The held-out part, read once. */
static moe_status measure_mixture(const moe_net *net, const method *m, const moe_data *test, double *value,
                                  moe_error *error) {
    static double memory[8192];
    static moe_real answer[MAX_SAMPLES * MAX_CLASSES];
    static int32_t answers[MAX_SAMPLES], alone[MAX_SAMPLES * MAX_EXPERTS];
    moe_layer_pass pass;
    moe_mixture mixture = {0};
    moe_metrics metrics;
    moe_report report;
    moe_error_shares shares;
    size_t n = test->n, classes = (size_t)net->d_out;
    size_t experts = (size_t)net->modules[0].layer.config.router.n_experts;
    void *work;
    moe_status status = run_mixture(net, test, &work, &pass);
    if (status != MOE_OK) {
        free(work);
        return status;
    }
    mixture.n = n;
    mixture.experts = experts;
    mixture.width = classes;
    mixture.p = pass.routing.weights;
    mixture.outputs = pass.expert_outputs;
    status = moe_mixture_answer(m->criterion, &mixture, NULL, answer, error);
    for (size_t i = 0; i < n; i++) {
        answers[i] = largest(classes, answer + i * classes);
        for (size_t e = 0; e < experts; e++)
            alone[i * experts + e] = largest(classes, mixture.outputs + (e * n + i) * classes);
    }
    if (status == MOE_OK) status = moe_metrics_init(&metrics, experts, classes, memory, sizeof memory);
    if (status == MOE_OK) status = moe_metrics_add(&metrics, &pass.routing, NULL, answers);
    if (status == MOE_OK) status = moe_metrics_report(&metrics, &report);
    if (status == MOE_OK) status = moe_gate_errors(n, experts, alone, answers, test->labels, NULL, NULL, &shares);
    free(work);
    if (status != MOE_OK) return status;
    value[ERROR] = shares.error;
    value[GATE_ERROR] = shares.gate_error;
    value[EXPERT_ERROR] = shares.expert_error;
    value[H_B] = report.gate_entropy;
    value[H_E] = report.usage_entropy;
    value[INFORMATION] = report.information_first;
    value[CHANCE] = report.information_first_chance;
    value[EXCESS] = report.information_first - report.information_first_chance;
    value[TRIVIAL_GATE] = report.trivial_gate;
    value[TRIVIAL_EXPERTS] = (double)shares.n_trivial;
    for (size_t e = 0; e < experts; e++) value[USED] += report.first[e] * 2 * (double)experts > (double)n;
    if (tables) show_table(&report);
    if (report_path != NULL) report_classes(m, &report);
    return MOE_OK;
}

/* An attack changes every pixel by at most `budget`, in `steps` steps along the sign of the
   gradient of the loss; 0 steps: none. One step is FGSM; PGD starts at a random point. */
typedef struct attack_row {
    int measure, steps;
    double budget;
} attack_row;

static const attack_row attacks[] = {
    {ERROR, 0, 0}, {FGSM_1, 1, 1.0 / 16}, {FGSM_2, 1, 2.0 / 16}, {PGD_1, 10, 1.0 / 16}, {PGD_2, 10, 2.0 / 16}};

static moe_real limited(moe_real v, moe_real low, moe_real high) { return v < low ? low : v > high ? high : v; }

/* Adds one step to x, all samples in one call. */
static moe_status attack_step(moe_net *net, const moe_data *clean, moe_real *x, moe_real step, moe_real budget,
                              void *work, size_t size) {
    static moe_real dy[MAX_SAMPLES * MAX_CLASSES], dx[MAX_SAMPLES * PIXELS];
    moe_call call = {0};
    moe_net_pass pass;
    moe_status status;
    call.n_tokens = clean->n;
    call.x = x;
    call.training = 1;
    if ((status = moe_net_forward(net, &call, work, size, &pass)) != MOE_OK) return status;
    (void)moe_cross_entropy(clean->n, (size_t)net->d_out, pass.y, clean->labels, dy);
    memset(dx, 0, clean->n * PIXELS * sizeof *dx); /* backward adds */
    if ((status = moe_net_backward(net, dy, dx, &pass)) != MOE_OK) return status;
    for (size_t i = 0; i < clean->n * PIXELS; i++) {
        moe_real moved = x[i] + step * (moe_real)((dx[i] > 0) - (dx[i] < 0));
        x[i] = limited(limited(moved, clean->x[i] - budget, clean->x[i] + budget), 0, 1);
    }
    return MOE_OK;
}

static moe_status measure_attacks(const moe_net *trained, const method *m, const setting *s, const moe_data *test,
                                  double *value, moe_error *error) {
    moe_net net = {0};
    size_t size = 0;
    void *work = NULL;
    moe_status status = build_net(&net, m, 0, s, error);
    if (status == MOE_OK) status = moe_net_work_size(&net, test->n, 1, &size);
    if (status == MOE_OK && (work = malloc(size)) == NULL) status = MOE_ERR_MEMORY;
    if (status == MOE_OK) copy_tensors(&net, trained, "");
    for (size_t a = 0; a < sizeof attacks / sizeof *attacks && status == MOE_OK; a++) {
        moe_real budget = (moe_real)attacks[a].budget, step = attacks[a].steps > 1 ? budget / 4 : budget;
        moe_call call = {0};
        moe_net_pass pass;
        moe_rng rng;
        moe_rng_seed(&rng, (uint64_t)s->seed);
        for (size_t i = 0; i < test->n * PIXELS; i++) {
            moe_real start = attacks[a].steps > 1 ? budget * (2 * moe_rng_uniform(&rng) - 1) : 0;
            part_x[i] = limited(test->x[i] + start, 0, 1);
        }
        for (int i = 0; i < attacks[a].steps && status == MOE_OK; i++)
            status = attack_step(&net, test, part_x, step, budget, work, size);
        call.n_tokens = test->n;
        call.x = part_x;
        if (status == MOE_OK) status = moe_net_forward(&net, &call, work, size, &pass);
        for (size_t i = 0; i < test->n && status == MOE_OK; i++)
            value[attacks[a].measure] +=
                (largest((size_t)net.d_out, pass.y + i * (size_t)net.d_out) != test->labels[i]) / (double)test->n;
    }
    value[ATTACKED] = (value[FGSM_1] + value[FGSM_2] + value[PGD_1] + value[PGD_2]) / 4;
    free(work);
    moe_net_free(&net);
    return status;
}

/* ---- results: one line each, in memory and in the CSV ---- */

typedef struct result {
    char key[KEY];
    double value[MEASURES];
} result;

static result results[MAX_RESULTS];
static size_t n_results, n_run; /* n_run: by this program, not read */
static const char key_names[] = "method,experts,tasks,epochs,temperature,importance,seed,fold";

/* The key has a suffix for digits other than those of examples/data. */
static void key_of(const method *m, const setting *s, char *key) {
    char data[20] = "";
    if (data_mark != USUAL_DIGITS) snprintf(data, sizeof data, "@%08lx", data_mark);
    snprintf(key, KEY, "%s%s,%ld,%ld,%ld,%g,%g,%ld,%ld", m->name, data, s->experts, s->tasks, s->epochs, s->temperature,
             s->importance, s->seed, s->fold);
}

static const result *find_result(const char *key) {
    for (size_t i = 0; i < n_results; i++)
        if (strcmp(results[i].key, key) == 0) return &results[i];
    return NULL;
}

static void header(char *line, size_t room) {
    size_t used = (size_t)snprintf(line, room, "%s", key_names);
    for (int i = 0; i < MEASURES; i++) used += (size_t)snprintf(line + used, room - used, ",%s", measures[i].name);
}

/* Parses a line of the CSV; the first eight columns are the key. 0 if it is incomplete, as after a
   crash. */
static int parse_result(char *line, result *r) {
    char *at = line;
    int columns = 0;
    for (; columns < 8 && at != NULL; columns++) at = strchr(at + (columns > 0), ',');
    if (at == NULL || at - line >= KEY || strchr(line, '\n') == NULL) return 0;
    memcpy(r->key, line, (size_t)(at - line));
    r->key[at - line] = '\0';
    for (int i = 0; i < MEASURES; i++) {
        char *end;
        if (*at != ',') return 0;
        r->value[i] = strtod(at + 1, &end);
        if (end == at + 1) return 0;
        at = end;
    }
    return *at == '\n';
}

/* Reads the CSV and positions it for appending. */
static int open_csv(FILE **csv) {
    char line[1024], wanted[1024];
    int whole = 1, rows = 0;
    *csv = NULL;
    if (csv_path == NULL) return 0;
    header(wanted, sizeof wanted);
    if ((*csv = fopen(csv_path, "a+")) == NULL) return fail(csv_path, "cannot be opened");
    rewind(*csv);
    for (; fgets(line, sizeof line, *csv) != NULL; rows++) {
        whole = strchr(line, '\n') != NULL;
        if (rows == 0 && (strncmp(line, wanted, strlen(wanted)) != 0 || !whole))
            return fail(csv_path, "is not a table of this program");
        if (rows > 0 && n_results < MAX_RESULTS) n_results += (size_t)parse_result(line, &results[n_results]);
    }
    fseek(*csv, 0, SEEK_END);
    if (rows == 0) fprintf(*csv, "%s\n", wanted);
    if (!whole) fputc('\n', *csv);
    return fflush(*csv) != 0 ? fail(csv_path, "cannot be written") : 0;
}

static int write_result(FILE *csv, const result *r) {
    fprintf(csv, "%s", r->key);
    for (int i = 0; i < MEASURES; i++) fprintf(csv, ",%.9g", r->value[i]);
    fputc('\n', csv);
    return fflush(csv) != 0 ? fail(csv_path, "cannot be written") : 0;
}

/* The result of a run, from the CSV or computed; NULL after an error message or when the user
   stopped it. */
static const result *run(const method *m, const setting *s, FILE *csv) {
    result made;
    const result *known;
    moe_net net = {0};
    moe_error error = {0};
    moe_status status;
    parts p;
    clock_t start = clock();
    memset(&made, 0, sizeof made);
    key_of(m, s, made.key);
    if ((known = find_result(made.key)) != NULL) return known;
    if (n_results == MAX_RESULTS) {
        fail(made.key, "no room for more results");
        return (const result *)NULL;
    }
    p = cut(s);
    status = train_method(m, s, &p, &net, made.value, &error);
    if (status == MOE_OK && stopped) status = MOE_ERR_STOPPED;
    if (status == MOE_OK && m->family == ATTACKED_NETS)
        status = measure_attacks(&net, m, s, &p.test, made.value, &error);
    else if (status == MOE_OK) status = measure_mixture(&net, m, &p.test, made.value, &error);
    moe_net_free(&net);
    if (status != MOE_OK) {
        if (status == MOE_ERR_STOPPED)
            fail("stopped", csv != NULL ? "the CSV has all finished runs" : "without --csv nothing is kept");
        else fail(made.key, error.message[0] ? error.message : moe_status_text(status));
        return NULL;
    }
    made.value[SECONDS] = (double)(clock() - start) / CLOCKS_PER_SEC;
    results[n_results++] = made;
    n_run++;
    return csv != NULL && write_result(csv, &made) ? NULL : &results[n_results - 1];
}

/* ---- showing ---- */

static const int mixture_columns[] = {ERROR,  GATE_ERROR,   EXPERT_ERROR,    H_B,  H_E, INFORMATION,
                                      CHANCE, TRIVIAL_GATE, TRIVIAL_EXPERTS, USED, -1};
static const int attack_columns[] = {ERROR, FGSM_1, FGSM_2, PGD_1, PGD_2, ATTACKED, -1};

static void show_head(const int *columns) {
    printf("%-16s %4s", "method", "seed");
    for (; *columns >= 0; columns++) printf(" %9s", measures[*columns].name);
    putchar('\n');
}

static void show_row(const char *name, const char *seed, const double *value, const int *columns) {
    printf("%-16s %4s", name, seed);
    for (; *columns >= 0; columns++) {
        if (measures[*columns].percent) printf(" %7.2f %%", 100 * value[*columns]);
        else printf(" %9.3f", value[*columns]);
    }
    putchar('\n');
    fflush(stdout);
}

/* Adds a row to the report's table; the first creates the figure. */
static void report_mean(const method *m, const double *mean) {
    static moe_figure *tables_of[2];
    static double values[2][METHODS * MEASURES];
    static const char *names[2][METHODS], *heads[2][MEASURES];
    int nets = m->family == ATTACKED_NETS;
    const int *columns = nets ? attack_columns : mixture_columns;
    moe_figure *f = tables_of[nets];
    size_t n = 0;
    if (f == NULL)
        f = tables_of[nets] = report_add(MOE_FIGURE_TABLE, nets ? "Nets under attack, means" : "Methods, means", 0, 0);
    for (; columns[n] >= 0; n++) {
        heads[nets][n] = measures[columns[n]].name;
        values[nets][f->rows * MEASURES + n] = mean[columns[n]] * (measures[columns[n]].percent ? 100 : 1);
    }
    names[nets][f->rows++] = m->name;
    f->columns = n;
    f->stride = MEASURES;
    f->values = values[nets];
    f->row_names = names[nets];
    f->column_names = heads[nets];
    f->row_label = "method";
    f->caption = "Errors in percent, entropies in nats; digits --list says more.";
}

/* One method with every seed. */
static int study_method(const method *m, FILE *csv) {
    const int *columns = m->family == ATTACKED_NETS ? attack_columns : mixture_columns;
    long seeds = n_seeds > 0 ? n_seeds : 3;
    double mean[MEASURES] = {0};
    for (long n = 0; n < seeds; n++) {
        setting s = common;
        const result *r;
        char seed[24];
        s.seed = first_seed + n;
        if ((r = run(m, &s, csv)) == NULL) return 1;
        for (int k = 0; k < MEASURES; k++) mean[k] += r->value[k] / (double)seeds;
        snprintf(seed, sizeof seed, "%ld", s.seed);
        show_row(m->name, seed, r->value, columns);
    }
    if (seeds > 1) show_row(m->name, "mean", mean, columns);
    if (report_path != NULL) report_mean(m, mean);
    return 0;
}

static int study(FILE *csv) {
    int shown = -1;
    for (int i = 0; i < METHODS; i++) {
        const method *m = &methods[i];
        if (wanted_methods != NULL ? !listed(wanted_methods, m->name)
                                   : m->family != (attack ? ATTACKED_NETS : MIXTURES))
            continue;
        if ((m->family == ATTACKED_NETS) != shown)
            show_head(m->family == ATTACKED_NETS ? attack_columns : mixture_columns);
        shown = m->family == ATTACKED_NETS;
        if (study_method(m, csv)) return 1;
    }
    return 0;
}

/* ---- claims ---- */

/* "a - b, of the measure, is above (direction 1) or below (-1) `bound`": paired by seed, the mean
   over folds being a seed's number. A bound on the other side of 0 is a margin: "error below that
   of b + 1 point" is "no disadvantage of 1 point". Of triv_gate, 0 or 1, Student's t is an
   approximation. */
typedef struct claim {
    const char *name, *a, *b;
    int measure, direction;
    double bound;
    long seeds, folds, experts, tasks;
    const char *statement, *source;
} claim;

#define KRISHNAMURTHY "Krishnamurthy et al. 2023"
#define NIELSEN "Nielsen et al. 2025"

static const claim claims[] = {
    {"dual_H_e", "collapse_dual", "collapse", H_E, 1, 0, 20, 1, 5, 1,
     "dual temperature prevents collapse: H_e is larger", KRISHNAMURTHY},
    {"dual_used", "collapse_dual", "collapse", USED, 1, 0, 20, 1, 5, 1,
     "dual temperature prevents collapse: more experts are used", KRISHNAMURTHY},
    {"dual_trivial", "collapse_dual", "collapse", TRIVIAL_GATE, -1, 0, 20, 1, 5, 1,
     "dual temperature prevents collapse: fewer gates are trivial", KRISHNAMURTHY},
    {"dual_stochastic", "stuck_dual", "stuck", TRIVIAL_GATE, -1, 0, 20, 1, 5, 1,
     "dual temperature prevents collapse, stochastic loss: fewer gates are trivial", KRISHNAMURTHY},
    {"attentive", "attentive", "importance", EXCESS, 1, 0, 20, FOLDS, 5, 1,
     "the attentive gate raises I(E;Y) above chance", KRISHNAMURTHY},
    {"similarity", "similarity", "importance", USED, -1, 0, 20, 1, 15, 2,
     "similarity uses fewer experts than importance, two tasks, 15 experts", KRISHNAMURTHY},
    {"pairs_random", "pairs", "random", ERROR, -1, 0.01, 20, 1, 5, 1,
     "a split by pairs of classes is no worse, by 1 point, than a random one", KRISHNAMURTHY},
    {"pairs_whole", "pairs", "expectation", ERROR, -1, 0.01, 20, 1, 5, 1,
     "a split by pairs of classes is no worse, by 1 point, than training end to end", KRISHNAMURTHY},
    {"halves_random", "halves", "random", ERROR, -1, 0.01, 20, 1, 5, 1,
     "a split by {0-4}, {5-9} is no worse, by 1 point, than a random one", KRISHNAMURTHY},
    {"halves_whole", "halves", "expectation", ERROR, -1, 0.01, 20, 1, 5, 1,
     "a split by {0-4}, {5-9} is no worse, by 1 point, than training end to end", KRISHNAMURTHY},
    {"attack", "net_ac", "net", ATTACKED, -1, 0, 30, 1, 8, 1, "adaptive clustering withstands attacks better", NIELSEN},
    {"attack_running", "net_ac_running", "net", ATTACKED, -1, 0, 30, 1, 8, 1,
     "adaptive clustering with averages from training withstands attacks better", NIELSEN}};
enum { CLAIMS = sizeof claims / sizeof *claims };

static void list(void) {
    printf("methods:\n");
    for (int i = 0; i < METHODS; i++) printf("  %-16s %s\n", methods[i].name, methods[i].about);
    printf("measures:\n");
    for (int i = 0; i < MEASURES; i++) printf("  %-16s %s\n", measures[i].name, measures[i].about);
    printf("claims:\n");
    for (const claim *c = claims; c < claims + CLAIMS; c++)
        printf("  %-16s %s (%s; %s against %s)\n", c->name, c->statement, c->source, c->a, c->b);
}

/* Every name in --methods and --only must be known. */
static int check_names(void) {
    size_t known = 0, wanted = 0;
    for (int i = 0; i < METHODS && wanted_methods != NULL; i++)
        known += (size_t)listed(wanted_methods, methods[i].name);
    for (int i = 0; i < CLAIMS && wanted_claims != NULL; i++) known += (size_t)listed(wanted_claims, claims[i].name);
    for (const char *at = wanted_methods; at != NULL; at = strchr(at, ','), at = at != NULL ? at + 1 : NULL) wanted++;
    for (const char *at = wanted_claims; at != NULL; at = strchr(at, ','), at = at != NULL ? at + 1 : NULL) wanted++;
    return known == wanted
               ? 0
               : fail("--methods or --only", "a name is unknown or given twice; --list has all of them");
}

static int is_wanted(const claim *c) { return wanted_claims == NULL || listed(wanted_claims, c->name); }
static long seeds_of(const claim *c) { return n_seeds > 0 ? n_seeds : c->seeds; }

/* A claim's setting for its i-th run, i < seeds * folds. */
static setting setting_of(const claim *c, long i) {
    setting s = common;
    s.experts = c->experts;
    s.tasks = c->tasks;
    s.seed = first_seed + i / c->folds;
    s.fold = i % c->folds;
    return s;
}

/* Runs the methods of one side of a claim. */
static int run_side(const claim *c, const char *name, FILE *csv) {
    long all = seeds_of(c) * c->folds;
    size_t made = n_run;
    time_t start = time(NULL);
    int terminal = isatty(2);
    for (long i = 0; i < all; i++) {
        setting s = setting_of(c, i);
        double each;
        if (run(find_method(name), &s, csv) == NULL) return 1;
        each = n_run > made ? difftime(time(NULL), start) / (double)(n_run - made) : 0;
        if (!terminal && i + 1 < all) continue; /* a log gets one line */
        fprintf(stderr, "%s%-16s %-16s run %ld of %ld, about %.0f s left    ", terminal ? "\r" : "", c->name, name,
                i + 1, all, each * (double)(all - i - 1));
    }
    return fputc('\n', stderr) == EOF;
}

/* Each seed's mean over folds. */
static void collect(const claim *c, const char *name, int measure, double *values) {
    for (long i = 0; i < seeds_of(c); i++) values[i] = 0;
    for (long i = 0; i < seeds_of(c) * c->folds; i++) {
        char key[KEY];
        setting s = setting_of(c, i);
        key_of(find_method(name), &s, key);
        values[i / c->folds] += find_result(key)->value[measure] / (double)c->folds;
    }
}

/* The paired differences a - b of a measure, against `bound`: mean and interval are of a - b, p is
   that of "the mean is bound". */
static statistics_result compare(const claim *c, int measure, double bound, double *mean_a, double *mean_b) {
    static double a[MAX_SEEDS], b[MAX_SEEDS];
    size_t n = (size_t)seeds_of(c);
    statistics_result r;
    collect(c, c->a, measure, a);
    collect(c, c->b, measure, b);
    *mean_a = statistics_paired(n, a, NULL).mean;
    *mean_b = statistics_paired(n, b, NULL).mean;
    for (size_t i = 0; i < n; i++) a[i] -= bound;
    r = statistics_paired(n, a, b);
    r.mean += bound;
    r.low += bound;
    r.high += bound;
    return r;
}

static const char *verdict(const claim *c, const statistics_result *r, double p) {
    if (!(p < 0.05)) return "undecided at this size";
    return (r->mean - c->bound) * c->direction > 0 ? "reproduced" : "opposite";
}

static void show_claim(const claim *c, const statistics_result *r, double p, double mean_a, double mean_b) {
    int percent = measures[c->measure].percent;
    double unit = percent ? 100 : 1, error_a, error_b;
    statistics_result error = compare(c, ERROR, 0, &error_a, &error_b);
    printf("%s: %s (%s)\n", c->name, c->statement, c->source);
    printf("    %s%s: %s %.3f, %s %.3f, ", measures[c->measure].name, percent ? " in %" : "", c->a, unit * mean_a, c->b,
           unit * mean_b);
    printf("difference %+.3f [%.3f, %.3f]", unit * r->mean, unit * r->low, unit * r->high);
    if (c->bound > 0 || c->bound < 0) printf(", margin %g", unit * c->bound);
    printf(", %d seeds%s, p %.2g: %s\n", (int)r->n, c->folds > 1 ? " of 5 folds" : "", p, verdict(c, r, p));
    if (c->measure != ERROR)
        printf("    error in %%: %.2f, %.2f, difference %+.2f [%.2f, %.2f]\n", 100 * error_a, 100 * error_b,
               100 * error.mean, 100 * error.low, 100 * error.high);
}

static void report_claims(const statistics_result *found, const double *holm, size_t n) {
    static const char *const heads[] = {"difference", "p", "verdict"};
    moe_figure *f = report_add(MOE_FIGURE_TABLE, "Claims", n, 3);
    const char **names = (const char **)report_grab(n, sizeof *names);
    const char **cells = (const char **)report_grab(3 * n, sizeof *cells);
    double *values = (double *)report_grab(3 * n, sizeof *values);
    double *spread = (double *)report_grab(3 * n, sizeof *spread);
    size_t at = 0;
    for (int i = 0; i < CLAIMS; i++) {
        double unit = measures[claims[i].measure].percent ? 100 : 1;
        if (!is_wanted(&claims[i])) continue;
        values[3 * at] = unit * found[at].mean;
        spread[3 * at] = unit * (found[at].high - found[at].mean);
        values[3 * at + 1] = holm[at];
        spread[3 * at + 1] = -1;
        cells[3 * at + 2] = verdict(&claims[i], &found[at], holm[at]);
        names[at++] = claims[i].statement;
    }
    f->caption = "Differences paired by seed with 95 % intervals; p by Holm over these claims.";
    f->row_names = names;
    f->column_names = heads;
    f->values = values;
    f->half_widths = spread;
    f->cells = cells;
    f->row_label = "claim";
}

static int judge_claims(FILE *csv) {
    statistics_result found[CLAIMS];
    double p[CLAIMS], holm[CLAIMS], mean_a[CLAIMS], mean_b[CLAIMS];
    size_t n = 0;
    for (int i = 0; i < CLAIMS; i++)
        if (is_wanted(&claims[i]) && (run_side(&claims[i], claims[i].a, csv) || run_side(&claims[i], claims[i].b, csv)))
            return 1;
    for (int i = 0; i < CLAIMS; i++) {
        if (!is_wanted(&claims[i])) continue;
        found[n] = compare(&claims[i], claims[i].measure, claims[i].bound, &mean_a[n], &mean_b[n]);
        p[n] = found[n].p;
        n++;
    }
    statistics_holm(n, p, holm);
    printf("Differences are paired by seed, with 95 %% intervals by Student's t; p is corrected by Holm over the %d "
           "claims.\n"
           "Seeds vary split, start and order of the same %d digits: intervals speak of these digits, not of others.\n",
           (int)n, (int)n_digits);
    n = 0;
    for (int i = 0; i < CLAIMS; i++)
        if (is_wanted(&claims[i])) {
            show_claim(&claims[i], &found[n], holm[n], mean_a[n], mean_b[n]);
            n++;
        }
    if (report_path != NULL) report_claims(found, holm, n);
    return 0;
}

/* ---- check ---- */

static int n_passed, n_failed;

static void expect(int good, const char *name, const char *what) {
    if (good) n_passed++;
    else {
        n_failed++;
        printf("FAILED: %s: %s\n", name, what);
    }
}

static int is_near(double got, double wanted) { return fabs(got - wanted) <= 1e-6 * (1 + fabs(wanted)); }

/* Against printed tables and numbers worked out by hand. */
static void check_statistics(void) {
    static const double quantiles[][3] = {{0.975, 1, 12.706205}, {0.975, 4, 2.776445}, {0.975, 19, 2.093024},
                                          {0.95, 9, 1.833113}, {0.05, 9, -1.833113}, {0.995, 30, 2.749996}};
    const double p[] = {0.01, 0.04, 0.03, 0.005}, a[] = {2, 4, 6, 8, 10};
    const double b[] = {1, 2, 3, 4, 5};
    double holm[4];
    statistics_result r = statistics_paired(5, a, b);
    for (size_t i = 0; i < sizeof quantiles / sizeof *quantiles; i++)
        expect(is_near(statistics_t_quantile(quantiles[i][0], quantiles[i][1]), quantiles[i][2]), "statistics",
               "quantile");
    expect(is_near(statistics_t_p(-2.776445105, 4), 0.05), "statistics", "p-value");
    statistics_holm(4, p, holm);
    expect(is_near(holm[0], 0.03) && is_near(holm[1], 0.06) && is_near(holm[2], 0.06) && is_near(holm[3], 0.02),
           "statistics", "Holm");
    expect(is_near(r.mean, 3) && is_near(r.error, sqrt(0.5)) && is_near(r.high, 3 + 2.776445105 * sqrt(0.5)),
           "statistics", "paired");
    expect(is_near(statistics_equivalence(&r, r.high), 0.05) && statistics_equivalence(&r, 2) >= 1, "statistics",
           "equivalence");
    expect(statistics_paired(3, b + 1, b + 1).p >= 1 && statistics_paired(1, a, b).p >= 1, "statistics",
           "no difference, no pairs");
}

/* Checks that every digit is held out in exactly one fold, and that parts are disjoint. */
static void check_folds(void) {
    setting s = common;
    double sum = 0, held = 0;
    double whole = 0;
    s.tasks = 2;
    for (size_t i = 0; i < n_digits * PIXELS; i++) sum += (double)gray[i];
    for (s.fold = 0; s.fold < FOLDS; s.fold++) {
        parts p = cut(&s);
        expect(p.train.n + p.validation.n + p.test.n == 2 * n_digits &&
                   p.validation.x == p.train.x + p.train.n * PIXELS &&
                   p.test.x == p.validation.x + p.validation.n * PIXELS,
               "folds", "the parts lie side by side");
        for (size_t i = 0; i < p.test.n * PIXELS; i++) {
            held += i / PIXELS % 2 == 0 ? (double)p.test.x[i] : 0; /* digits, each followed by its inverse */
            whole += (double)p.test.x[i];
        }
    }
    expect(is_near(held, sum) && is_near(whole, (double)(n_digits * PIXELS)), "folds",
           "every digit is held out once, beside its inverse");
}

static void check_method(const method *m) {
    setting s = common;
    const result *r;
    result first;
    const double *v = first.value;
    double most = log((double)s.experts) + 1e-6;
    if ((r = run(m, &s, NULL)) == NULL) {
        expect(0, m->name, "runs");
        return;
    }
    first = *r;
    n_results--; /* forgotten, so made anew */
    r = run(m, &s, NULL);
    first.value[SECONDS] = r != NULL ? r->value[SECONDS] : 0;
    expect(r != NULL && memcmp(&first, r, sizeof first) == 0, m->name, "the same seed gives the same numbers");
    expect(v[ERROR] < 0.25, m->name, "under 25 % errors");
    if (m->family == ATTACKED_NETS) {
        expect(v[FGSM_1] > v[ERROR] && v[FGSM_2] > v[FGSM_1], m->name, "FGSM hurts, more with more budget");
        expect(v[PGD_1] > v[ERROR] && v[PGD_2] >= v[FGSM_2], m->name, "PGD hurts, no less than FGSM");
        return;
    }
    expect(v[H_B] <= v[H_E] + 1e-6 && v[H_E] <= most && v[INFORMATION] <= most, m->name,
           "H_b <= H_e <= ln E, I <= ln E");
    expect(v[ERROR] <= v[GATE_ERROR] + v[EXPERT_ERROR] + 1e-9, m->name, "an error is the gate's or the experts'");
    expect(v[USED] >= 1 && v[USED] <= (double)s.experts, m->name, "1 to E experts are used");
}

static double last_value(const char *name, int measure) {
    char key[KEY];
    const result *r;
    key_of(find_method(name), &common, key);
    r = find_result(key);
    return r != NULL ? r->value[measure] : -1;
}

/* The key of a run with the digits of a mark. */
static const char *key_with(const method *m, const setting *s, unsigned long mark) {
    static char key[KEY];
    unsigned long own = data_mark;
    setting last = *s;
    last.seed = 3;
    data_mark = mark;
    key_of(m, &last, key);
    data_mark = own;
    return key;
}

/* A CSV is not repeated; a line that a crash cut off is. */
static void check_resume(void) {
    const method *m = find_method("pre_softmax");
    char text[4096];
    size_t length, before;
    FILE *csv;
    setting s = common;
    csv_path = "digits_check.tmp0";
    s.epochs = 2;
    remove(csv_path);
    for (int round = 0; round < 4; round++) {
        n_results = 0;
        before = n_run;
        if (open_csv(&csv)) {
            expect(0, "resume", "the CSV opens");
            return;
        }
        for (s.seed = 1; s.seed <= 3; s.seed++) expect(run(m, &s, csv) != NULL, "resume", "runs");
        fclose(csv);
        expect(n_run - before == (round == 0 ? 3 : round == 2 ? 1 : 0), "resume", "only what is missing is run");
        expect(find_result(key_with(m, &s, data_mark)) != NULL, "resume", "the CSV has the run");
        expect(find_result(key_with(m, &s, data_mark + 1)) == NULL, "resume", "the CSV has no run with other digits");
        if (round != 1) continue;
        if ((csv = fopen(csv_path, "rb")) == NULL) return;
        length = fread(text, 1, sizeof text, csv);
        fclose(csv);
        if ((csv = fopen(csv_path, "wb")) == NULL) return;
        fwrite(text, 1, length - 5, csv);
        fclose(csv);
    }
    remove(csv_path);
}

static int run_check(void) {
    common.epochs = 10;
    common.temperature = 4;
    check_statistics();
    check_folds();
    for (int i = 0; i < METHODS; i++) check_method(&methods[i]);
    expect(last_value("pairs", EXCESS) > last_value("random", EXCESS) + 0.5, "pairs",
           "its experts tell more than those of random shares");
    expect(last_value("pairs", TRIVIAL_GATE) < 0.5 && last_value("pairs", USED) > 4.5, "pairs", "all experts are used");
    check_resume();
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed > 0;
}

int main(int count, char **words) {
    FILE *csv;
    int status;
    if (read_options(count, words) || check_names()) return EXIT_USAGE;
    if (data_path == NULL) data_path = example_file("data/digits.csv");
    if (read_digits()) return 1;
    signal(SIGINT, on_interrupt);
    if (check) return run_check();
    if (report_refused() != NULL) return fail(report_path, report_refused());
    if (open_csv(&csv)) return 1;
    status = judge ? judge_claims(csv) : study(csv);
    if (status == 0) status = report_write_added("digits", "What experts learn of digits");
    if (status == 0) status = finish();
    if (csv != NULL && fclose(csv) != 0) return fail(csv_path, "cannot be written");
    return status;
}
