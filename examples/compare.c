/* Trains routers on the same text with the same seeds and budget, and tests the claims of their
   papers.
     cc -std=c99 -O2 -I. examples/compare.c -o compare -lm && ./compare
     (or: sh examples/run compare) */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include "language.h"
#include "study.h"

#include <errno.h>
#include <signal.h>
#include <time.h>
#ifdef _WIN32
#include <io.h>
#else
#include <unistd.h>
#endif

enum {
    DRAWS = 5,         /* contaminated copies of the held-out text */
    PARTS = 20,        /* parts of the text, each with a held-out stretch */
    VERDICT_SEEDS = 3, /* least number of seeds for a verdict */
    TABLE_SEEDS = 3, CLAIM_SEEDS = 5, /* default of --seeds */
    MAX_LAYERS = 16, MAX_SEEDS = 100, MAX_ENTRIES = 256, MAX_FILES = 8,
    KEY = 600, NAME = 40, CURVE = 2048, LINE = 8192
};
#define HELD_SHARE 0.1      /* held-out share of the text */
#define CONTAMINATION 0.025 /* share of its tokens that are replaced by an unseen one */

static const char help[] =
    "compare [options]   trains routers on one text with the same seeds and budget; two tables show how well\n"
    "                    they predict text that was held out, and how they route it\n"
    "compare --claim NAME[,NAME...]    tests claims of papers, 5 seeds unless --seeds; --claim all: every one\n"
    "compare --ablate NAME[,NAME...]   runs a study: variants of a router\n"
    "compare --sweep     the first router at several widths, numbers of experts and steps\n"
    "compare --claims    lists the claims; compare --list: routers, studies and claims\n"
    "compare --check     tests itself in seconds\n"
    "  --routers A,B,C   what is compared; the first is the baseline (smoe,similarity_smoe,acmoe_running)\n"
    "  --seeds N         seeds 1 to N; --seeds 3,7,9: these (3)\n"
    "  --data FILE       text to train on, may be given again (the library's own headers)\n"
    "  --valid FILE      held-out text (a tenth of the training text, in 20 stretches)\n"
    "  --test FILE       text that is scored once, at the end of each run; nothing is chosen by it\n"
    "  --csv FILE        keeps a row per run there; the same command goes on where it was stopped\n"
    "  --markdown        prints tables for a README\n" REPORT_HELP;

/* ---- settings: what must be the same for two runs to be compared ---- */

enum {
    WIDTH, LAYERS, CONTEXT, BATCH, EXPERTS, TOP_K, D_FF, STEPS, EVALUATIONS, HELD, WORDS, VOCABULARY, AC_FIRST,
    AOE_RECIPE, RATE, BALANCE, N_SETTINGS
};

typedef struct setting {
    const char *name; /* --name; a switch where most is 1 */
    double usual, least, most;
    const char *about;
} setting;

static const setting setting_rows[N_SETTINGS] = {
    {"width", 64, 8, 4096, "d, numbers per token"},
    {"layers", 3, 1, MAX_LAYERS, "layers of attention and experts"},
    {"context", 128, 4, 4096, "tokens in a sequence"},
    {"batch", 4, 1, 1024, "sequences in a step"},
    {"experts", 16, 2, 1024, "experts in a layer"},
    {"top-k", 2, 1, 64, "experts per token, of routers that take more than one"},
    {"d-ff", 128, 2, 65536, "hidden width of a swiglu expert; other kinds get as many parameters"},
    {"steps", 800, 1, 1e7, "of the optimizer"},
    {"evaluations", 10, 2, 100, "in a run, on the held-out text"},
    {"held", 8192, 64, 1e8, "most tokens that an evaluation reads; of the test text 8 times as many"},
    {"words", 0, 0, 1, "words between white space instead of bytes"},
    {"vocabulary", 4096, 2, 1e6, "most different words; the others are <unk>"},
    {"ac-first", 3, 2, MAX_LAYERS, "first layer with adaptive clustering, as in its paper; those before are smoe"},
    {"aoe-recipe", 0, 0, 1, "optimizer of Autonomy-of-Experts: betas 0.9, 0.95, decay 0.1, clip 1, cosine to 1/16"},
    {"rate", 7e-4, 1e-6, 1, "learning rate; warm-up over a tenth of the steps, then cosine to a tenth"},
    {"balance", 0.01, 0, 10, "balance loss, of routers without one whose gates are a softmax"},
};

typedef struct settings {
    double value[N_SETTINGS];
} settings;

/* The optimizer, without and with --aoe-recipe. */
static const struct {
    double beta1, beta2, decay, clip, final_rate;
} recipes[] = {{0.9, 0.999, 0, 1, 0.1}, {0.9, 0.95, 0.1, 1, 0.0625}};

static size_t size_of(const settings *s, int i) { return (size_t)s->value[i]; }
static int int_of(const settings *s, int i) { return (int)s->value[i]; }

/* ---- routers ---- */

/* One row per router that is more than a preset of moe_presets; presets need none. */
typedef struct variant {
    const char *name;
    const char *preset;   /* "": no router, a feed-forward as wide as the active experts of a token */
    const char *settings; /* of moe_layer_fields, after the preset's; @name is replaced by a number, see filled_in */
    const char *where;    /* one letter per layer: x this router, . others; the last letter is repeated */
    const char *others;
    const char *takes;    /* "", or the router whose trained tensors are used instead of training */
    const char *about;
} variant;

#define ALL "x", ""
#define CLUSTERED "ac", "smoe" /* x from layer --ac-first on */
#define EVERY_OTHER ".x.x.x.x.x.x.x.x", "dense"

static const variant variants[] = {
    {"dense", "", "", ALL, "", "no router: one feed-forward as wide as the experts that a token visits"},
    {"glam", "glam", "", EVERY_OTHER, "", "smoe on every other layer"},
    {"similarity_glam", "similarity_glam", "", EVERY_OTHER, "", "similarity-aware on every other layer"},
    {"attention_smoe_fixed", "attention_smoe", "attention_heads=fixed", ALL, "", "attention-aware by the first head"},
    {"attention_smoe_all", "attention_smoe", "attention_heads=all", ALL, "", "attention-aware by all heads"},
    {"attention_xmoe_fixed", "attention_xmoe", "attention_heads=fixed", ALL, "",
     "attention-aware xmoe by the first head"},
    {"attention_dropout_fixed", "attention_smoe_dropout", "attention_heads=fixed", ALL, "",
     "attention-aware smoe_dropout by the first head"},
    {"acmoe", "acmoe", "router_bias=1", CLUSTERED, "", "adaptive clustering over the call, as in the paper"},
    {"acmoe_code", "acmoe_code", "", CLUSTERED, "", "adaptive clustering over the call, as in its authors' program"},
    {"acmoe_threshold", "acmoe_threshold", "router_bias=1", CLUSTERED, "",
     "adaptive clustering, all experts above a threshold"},
    {"acmoe_running", "acmoe", "ac_mode=running router_bias=1", CLUSTERED, "",
     "adaptive clustering by running averages"},
    {"acmoe_mix2", "acmoe", "ac_mode=running router_bias=1 ac_mix=2", CLUSTERED, "",
     "acmoe_running mixed over the two best experts"},
    {"acmoe_variance", "acmoe", "ac_mode=running router_bias=1 ac_spread=variance", CLUSTERED, "",
     "acmoe_running by variance"},
    {"acmoe_random", "acmoe", "ac_mode=random router_bias=1", CLUSTERED, "",
     "fixed random scaling, the papers' control"},
    {"acmoe_from_2", "acmoe", "ac_mode=running router_bias=1", ".x", "smoe", "",
     "acmoe_running from the second layer on"},
    {"acmoe_only_2", "acmoe", "ac_mode=running router_bias=1", ".x.", "smoe", "",
     "acmoe_running in the second layer alone"},
    {"stablemoe", "stablemoe", "freeze_at=@half_steps table_size=@ids", ALL, "",
     "stablemoe, frozen after half of the steps"},
    {"hash", "hash", "table_size=@ids", ALL, "", "experts by a table of token ids"},
    {"soft_moe", "soft_moe", "soft_sequences=@batch", ALL, "", "soft mixtures of tokens"},
    {"locmoe_plus_all", "locmoe_plus", "affinity_sum_auto=0 affinity_mass=1", ALL,
     "", "locmoe_plus that serves every token"},
    {"locmoe_plus_0.4", "locmoe_plus", "affinity_sum_auto=0 affinity_mass=0.4", ALL,
     "", "locmoe_plus, affinity_mass 0.4"},
    {"locmoe_plus_0.8", "locmoe_plus", "affinity_sum_auto=0 affinity_mass=0.8", ALL,
     "", "locmoe_plus, affinity_mass 0.8"},
    {"similarity_tau_0.1", "similarity_smoe", "similarity_tau=0.1", ALL, "", "tau 0.1"},
    {"similarity_tau_2", "similarity_smoe", "similarity_tau=2", ALL, "", "tau 2"},
    {"similarity_tau_sqrt_d", "similarity_smoe", "similarity_tau=@sqrt_width", ALL, "", "tau sqrt(d)"},
    {"similarity_tau_falls", "similarity_smoe",
     "similarity_tau=@sqrt_width tau_schedule=similarity_tau tau_end=1 "
     "schedule_steps=@steps",
     ALL, "", "tau from sqrt(d) to 1"},
    {"similarity_tau_rises", "similarity_smoe",
     "similarity_tau=1 tau_schedule=similarity_tau tau_end=@sqrt_width "
     "schedule_steps=@steps",
     ALL, "", "tau from 1 to sqrt(d)"},
    {"similarity_learned", "similarity_smoe", "similarity_tau=@sqrt_width similarity_learned=1", ALL, "",
     "tau sqrt(d), W_s learned"},
    {"similarity_first", "similarity_smoe", "", "x.", "smoe", "", "similarity-aware in the first layer alone"},
    {"similarity_later", "similarity_smoe", "", ".x", "smoe", "", "similarity-aware from the second layer on"},
    {"attention_sigma_0.1", "attention_smoe", "attention_heads=fixed attention_sigma=0.1", ALL, "", "sigma 0.1"},
    {"attention_sigma_2", "attention_smoe", "attention_heads=fixed attention_sigma=2", ALL, "", "sigma 2"},
    {"attention_sigma_sqrt_d", "attention_smoe", "attention_heads=fixed attention_sigma=@sqrt_width", ALL, "",
     "sigma sqrt(d)"},
    {"attention_sigma_falls", "attention_smoe",
     "attention_heads=fixed attention_sigma=@sqrt_width tau_schedule=attention_sigma tau_end=1 schedule_steps=@steps",
     ALL, "", "sigma from sqrt(d) to 1"},
    {"attention_sigma_rises", "attention_smoe",
     "attention_heads=fixed attention_sigma=1 tau_schedule=attention_sigma tau_end=@sqrt_width schedule_steps=@steps",
     ALL, "", "sigma from 1 to sqrt(d)"},
    {"smoe_1_of_16", "smoe", "n_experts=16 top_k=1 weight=raw", ALL, "", "smoe, 1 of 16 experts"},
    {"smoe_2_of_16", "smoe", "n_experts=16 top_k=2", ALL, "", "smoe, 2 of 16 experts"},
    {"smoe_8_of_16", "smoe", "n_experts=16 top_k=8", ALL, "", "smoe, 8 of 16 experts"},
    {"smoe_2_of_32", "smoe", "n_experts=32 top_k=2", ALL, "", "smoe, 2 of 32 experts"},
    {"similarity_1_of_16", "similarity_smoe", "n_experts=16 top_k=1 weight=raw", ALL, "",
     "similarity_smoe, 1 of 16 experts"},
    {"similarity_2_of_16", "similarity_smoe", "n_experts=16 top_k=2", ALL, "", "similarity_smoe, 2 of 16 experts"},
    {"similarity_8_of_16", "similarity_smoe", "n_experts=16 top_k=8", ALL, "", "similarity_smoe, 8 of 16 experts"},
    {"similarity_2_of_32", "similarity_smoe", "n_experts=32 top_k=2", ALL, "", "similarity_smoe, 2 of 32 experts"},
    {"smoe_2_of_4", "smoe", "n_experts=4 top_k=2", ALL, "", "smoe, 2 of 4 experts"},
    {"smoe_2_of_8", "smoe", "n_experts=8 top_k=2", ALL, "", "smoe, 2 of 8 experts"},
    {"aoe_low_8", "aoe", "d_low=8", ALL, "", "aoe, d_low 8"},
    {"aoe_low_16", "aoe", "d_low=16", ALL, "", "aoe, d_low 16"},
    {"aoe_low_32", "aoe", "d_low=32", ALL, "", "aoe, d_low 32"},
    {"aoe_low_48", "aoe", "d_low=48", ALL, "", "aoe, d_low 48"},
    {"smoe_factorised", "smoe", "expert=factorised", ALL, "", "the experts of aoe with an ordinary router"},
    {"smoe_mlp_router", "smoe", "score=mlp router_hidden=256 router_bias=0", ALL, "",
     "smoe with a router of 256 hidden units"},
    {"norm_gate", "smoe", "score=norm norm_node=gate router_bias=0", ALL, "smoe",
     "smoe, trained, then routed by |gate|"},
    {"norm_up", "smoe", "score=norm norm_node=up router_bias=0", ALL, "smoe", "smoe, trained, then routed by |up|"},
    {"norm_act", "smoe", "score=norm norm_node=act router_bias=0", ALL, "smoe", "smoe, trained, then routed by |act|"},
    {"norm_product", "smoe", "score=norm norm_node=product router_bias=0", ALL, "smoe",
     "smoe, trained, then routed by |product|"},
    {"norm_output", "smoe", "score=norm norm_node=output router_bias=0", ALL, "smoe",
     "smoe, trained, then routed by |output|"},
    {"norm_output_l1", "smoe", "score=norm norm_node=output norm_order=l1 router_bias=0", ALL, "smoe",
     "the same by the sum of |output_i|"},
    {"norm_output_linf", "smoe", "score=norm norm_node=output norm_order=linf router_bias=0", ALL, "smoe",
     "the same by the largest |output_i|"},
    {"norm_control", "smoe", "score=grap router_bias=0", ALL, "smoe",
     "smoe, trained, then routed by features: no knowledge of experts"},
    {NULL, NULL, NULL, NULL, NULL, NULL, NULL},
};

/* Groups of routers for --ablate; the others are compared with the first. */
static const struct {
    const char *name, *routers, *about;
} studies[] = {
    {"tau",
     "smoe,similarity_smoe,similarity_tau_0.1,similarity_tau_2,similarity_tau_sqrt_d,similarity_tau_falls,similarity_"
     "tau_rises,similarity_learned",
     "similarity-aware routing: tau 1, 0.1, 2, sqrt(d), schedules"},
    {"sigma",
     "smoe,attention_smoe_fixed,attention_sigma_0.1,attention_sigma_2,attention_sigma_sqrt_d,attention_sigma_falls,"
     "attention_sigma_rises",
     "attention-aware routing: sigma 1, 0.1, 2, sqrt(d), schedules"},
    {"heads", "smoe,attention_smoe_fixed,attention_smoe_all", "attention-aware routing: the first head, all heads"},
    {"choices",
     "smoe_2_of_16,smoe_1_of_16,smoe_8_of_16,smoe_2_of_32,similarity_1_of_16,similarity_2_of_16,similarity_8_of_16,"
     "similarity_2_of_32",
     "experts per token and experts: (2,16), (1,16), (8,16), (2,32)"},
    {"experts", "smoe_2_of_16,smoe_2_of_4,smoe_2_of_8,smoe_2_of_32", "number of experts"},
    {"spread", "smoe,acmoe_running,acmoe_variance,acmoe_random", "adaptive clustering: mad, variance, random scaling"},
    {"mixing", "smoe,acmoe_running,acmoe_mix2", "adaptive clustering: mixed over 1 and 2 experts"},
    {"placement", "smoe,acmoe_running,acmoe_from_2,acmoe_only_2,similarity_smoe,similarity_first,similarity_later",
     "which layers have the router"},
    {"d_low", "aoe,aoe_low_8,aoe_low_16,aoe_low_32,aoe_low_48",
     "autonomy of experts: d_low (d/3, 8, 16, 32, 48), equal parameters"},
    {"affinity", "locmoe_plus_all,locmoe_plus,locmoe_plus_0.4,locmoe_plus_0.8",
     "share of its affinity that an expert keeps: 1, 0.6, 0.4, 0.8"},
    {"autonomy", "smoe,aoe,smoe_factorised,smoe_mlp_router",
     "what makes it better: the experts' shape, a large router?"},
    {"norms", "smoe,norm_gate,norm_up,norm_act,norm_product,norm_output,norm_output_l1,norm_output_linf,norm_control",
     "the router of a trained network replaced by a norm inside the experts"},
};
enum { N_STUDIES = sizeof studies / sizeof studies[0] };

/* ---- metrics ---- */

/* The metrics of a row of the CSV, in order; for routers, means over layers. SAVED and RELATIVE are
   derived from others. */
enum {
    LOSS, FINAL, TRAIN, CONTAMINATED, CLEAN, TEST, FLUCTUATION, ENTROPY, LOAD_ENTROPY, LOAD_MAX, INSTABILITY, CHANCE,
    DROPPED, SERVED, OFF_DIAGONAL, PARAMETERS, ACTIVE, MS, N_METRICS, SAVED = N_METRICS, RELATIVE, N_MEASURES
};

static const struct {
    const char *name, *label;
    int decimals, is_held_out; /* 1: says something about text, so that later tokens must not be seen */
    const char *about;
} metrics[N_MEASURES] = {
    {"loss", "loss", 4, 1, "least of the evaluations, nats per token of the held-out text"},
    {"final_loss", "final loss", 4, 1, "of the last evaluation"},
    {"train_loss", "train loss", 4, 0, "mean of the last tenth of the steps"},
    {"contaminated", "contaminated", 4, 1,
     "final loss with 2.5 % of the tokens replaced by one unseen in training, mean of 5 draws"},
    {"contaminated_clean", "clean targets", 4, 1, "the same over positions whose target was not replaced"},
    {"test_loss", "test", 4, 1, "final loss on the test text"},
    {"fluctuation", "fluctuation", 4, 0,
     "share of held-out tokens whose first expert differs from the evaluation before"},
    {"gate_entropy", "entropy", 4, 0, "mean H(p), p normalized"},
    {"load_entropy", "load entropy", 4, 0, "H of the experts' shares"},
    {"load_max", "max/mean", 3, 0, "largest load / mean load"},
    {"instability", "instability", 4, 0,
     "share of the token pairs that have an expert in common at one of two layers and not at the next"},
    {"chance", "by chance", 4, 0, "instability of layers that have nothing to do with each other"},
    {"dropped", "dropped", 4, 0, "share of the chosen pairs that a capacity dropped"},
    {"served", "served", 4, 0, "share of the tokens that some expert worked on"},
    {"off_diagonal", "off diagonal", 4, 0, "mean over tokens of 1 - S_ii: what a token's p takes from other tokens"},
    {"parameters", "parameters", 0, 0, "numbers that are learned"},
    {"active", "per token", 0, 0, "of these, used by a token"},
    {"ms_per_step", "ms/step", 1, 0, "processor time of a training step"},
    {"", "steps saved", 0, 1,
     "steps by which it comes sooner to the baseline's final loss; if it never does, minus the baseline's lead to its "
     "own"},
    {"", "rel. instab.", 4, 0, "instability divided by its chance value"},
};

/* ---- claims ---- */

static const struct {
    const char *name, *text, *source;
} papers[] = {
    {"similarity", "Similarity-aware routing lowers perplexity, fluctuation and entropy.",
     "Nguyen et al. 2025, graph of tokens"},
    {"attention", "Attention-aware routing lowers perplexity, fluctuation and entropy.",
     "Nguyen et al. 2025, graph of tokens"},
    {"bases", "Both do so over X-MoE and over frozen routers.", "Nguyen et al. 2025, graph of tokens"},
    {"clustering", "Adaptive clustering lowers perplexity, also contaminated, and instability; it needs fewer steps.",
     "Nielsen et al. 2025, tight clusters"},
    {"spread", "Scaling by mean absolute deviation beats variance and random scaling.",
     "Nielsen et al. 2025, tight clusters"},
    {"autonomy", "Autonomy of experts lowers the loss at equal parameters, balances load, is surer of its choice.",
     "Lv et al. 2025, autonomy of experts"},
    {"locality", "LocMoE+ keeps the loss (within 0.01 nats) while it serves fewer tokens.", "Li et al. 2024, LocMoE+"},
    {"sparsity", "An MoE network is better than a dense one of equal active size at equal steps.",
     "Shazeer et al. 2017, Fedus et al. 2022"},
};
enum { N_PAPERS = sizeof papers / sizeof papers[0] };

/* treatment - baseline is below margin (sign -1) or above it (sign 1). */
typedef struct claim {
    const char *paper, *treatment, *baseline;
    int metric, sign;
    double margin;
} claim;

static const claim claims[] = {
    {"similarity", "similarity_smoe", "smoe", LOSS, -1, 0},
    {"similarity", "similarity_smoe", "smoe", FLUCTUATION, -1, 0},
    {"similarity", "similarity_smoe", "smoe", ENTROPY, -1, 0},
    {"similarity", "similarity_tau_sqrt_d", "smoe", LOSS, -1, 0},
    {"similarity", "similarity_tau_sqrt_d", "smoe", FLUCTUATION, -1, 0},
    {"similarity", "similarity_tau_sqrt_d", "smoe", ENTROPY, -1, 0},
    {"attention", "attention_smoe_fixed", "smoe", LOSS, -1, 0},
    {"attention", "attention_smoe_fixed", "smoe", FLUCTUATION, -1, 0},
    {"attention", "attention_smoe_fixed", "smoe", ENTROPY, -1, 0},
    {"attention", "attention_sigma_sqrt_d", "smoe", LOSS, -1, 0},
    {"attention", "attention_sigma_sqrt_d", "smoe", FLUCTUATION, -1, 0},
    {"attention", "attention_sigma_sqrt_d", "smoe", ENTROPY, -1, 0},
    {"bases", "similarity_xmoe", "xmoe", LOSS, -1, 0},
    {"bases", "similarity_xmoe", "xmoe", FLUCTUATION, -1, 0},
    {"bases", "similarity_xmoe", "xmoe", ENTROPY, -1, 0},
    {"bases", "attention_xmoe_fixed", "xmoe", LOSS, -1, 0},
    {"bases", "attention_xmoe_fixed", "xmoe", FLUCTUATION, -1, 0},
    {"bases", "attention_xmoe_fixed", "xmoe", ENTROPY, -1, 0},
    {"bases", "similarity_smoe_dropout", "smoe_dropout", LOSS, -1, 0},
    {"bases", "similarity_smoe_dropout", "smoe_dropout", FLUCTUATION, -1, 0},
    {"bases", "similarity_smoe_dropout", "smoe_dropout", ENTROPY, -1, 0},
    {"bases", "attention_dropout_fixed", "smoe_dropout", LOSS, -1, 0},
    {"bases", "attention_dropout_fixed", "smoe_dropout", FLUCTUATION, -1, 0},
    {"bases", "attention_dropout_fixed", "smoe_dropout", ENTROPY, -1, 0},
    {"clustering", "acmoe_running", "smoe", LOSS, -1, 0},
    {"clustering", "acmoe_running", "smoe", CONTAMINATED, -1, 0},
    {"clustering", "acmoe_running", "smoe", RELATIVE, -1, 0},
    {"clustering", "acmoe_running", "smoe", SAVED, 1, 0},
    {"spread", "acmoe_running", "acmoe_variance", LOSS, -1, 0},
    {"spread", "acmoe_running", "acmoe_random", LOSS, -1, 0},
    {"autonomy", "aoe", "smoe", LOSS, -1, 0},
    {"autonomy", "aoe", "smoe", LOAD_ENTROPY, 1, 0},
    {"autonomy", "aoe", "smoe", ENTROPY, -1, 0},
    {"locality", "locmoe_plus", "locmoe_plus_all", TRAIN, -1, 0.01},
    {"locality", "locmoe_plus", "locmoe_plus_all", SERVED, -1, 0},
    {"sparsity", "smoe", "dense", LOSS, -1, 0},
};
enum { N_CLAIMS = sizeof claims / sizeof claims[0] };

/* ---- the program's state ---- */

typedef struct sample {
    int32_t *ids, *labels; /* [sequences * context] */
    size_t sequences;
} sample;

static struct {
    struct language language;
    language_text train;
    sample held, test, draws[DRAWS];
    int32_t absent;       /* an id that occurs in no text */
    int ids;              /* ids are 0..ids-1 */
    uint64_t fingerprint; /* of all texts */
    moe_buffer bytes, kept; /* the texts of the words */
} data;

/* One router with its settings, and the position of its rows. */
typedef struct entry {
    settings s;
    const variant *v;
    char key[KEY];
} entry;

/* One finished run. */
typedef struct row {
    char key[KEY], router[NAME];
    int seed, causal;
    double value[N_METRICS]; /* NONE: missing */
    char curve[CURVE];       /* "50:2.3811 100:2.2069 ": loss after these steps */
    char layers[CURVE];      /* fluctuation of each layer */
} row;

static entry entries[MAX_ENTRIES];
static int n_entries, seeds[MAX_SEEDS], n_seeds, quiet;
static row *rows;
static size_t n_rows;
static const char *csv_path;
static int csv_failed;
static volatile sig_atomic_t stopped;

static void stop(int signal_number) { stopped = signal_number; }

static int complain(const char *message) {
    fprintf(stderr, "compare: %s\n", message);
    return 1;
}

/* ---- routers by name ---- */

/* A row of the table, or one made from a preset; NULL: unknown name. */
static const variant *find_variant(const char *name) {
    static variant made[MAX_ENTRIES];
    static int n_made;
    const moe_preset *preset = moe_preset_find(name);
    const variant *v;
    for (v = variants; v->name != NULL; v++)
        if (strcmp(v->name, name) == 0) return v;
    for (v = made; v < made + n_made; v++)
        if (preset != NULL && strcmp(v->name, preset->name) == 0) return v;
    if (preset == NULL || n_made == MAX_ENTRIES) return NULL;
    made[n_made] = (variant){preset->name, preset->name, "", "x", "", "", preset->formula};
    return &made[n_made++];
}

static const variant *variant_of_layer(const settings *s, const variant *v, int layer) {
    size_t length = strlen(v->where);
    char letter = v->where[(size_t)layer < length ? (size_t)layer : length - 1];
    if (strcmp(v->where, "ac") == 0) letter = layer + 1 >= int_of(s, AC_FIRST) ? 'x' : '.';
    return letter == 'x' ? v : find_variant(v->others);
}

/* The number that replaces @name. */
static double filled_in(const settings *s, const char *name, size_t length) {
    static const char *const names[] = {"sqrt_width", "half_steps", "ids"};
    double values[] = {sqrt(s->value[WIDTH]), floor(s->value[STEPS] / 2) + 1, (double)data.ids};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strlen(names[i]) == length && strncmp(names[i], name, length) == 0) return values[i];
    for (int i = 0; i < N_SETTINGS; i++)
        if (strlen(setting_rows[i].name) == length && strncmp(setting_rows[i].name, name, length) == 0)
            return s->value[i];
    return 0;
}

static void fill_in(const settings *s, const char *text, char *out, size_t room) {
    size_t n = 0, length;
    while (*text != '\0' && n + 1 < room) {
        length = strspn(text + 1, "abcdefghijklmnopqrstuvwxyz_");
        if (*text != '@') out[n++] = *text++;
        else {
            n += (size_t)snprintf(out + n, room - n, "%.9g", filled_in(s, text + 1, length));
            text += 1 + length;
        }
    }
    out[n < room ? n : room - 1] = '\0';
}

/* The hidden width at which an expert of any kind has as many parameters as a swiglu of width f. */
static int fair_width(const moe_layer_config *c, int d, int f) {
    int low = c->d_low > 0 ? c->d_low : (d + 2) / 3;
    if (c->expert == MOE_EXPERT_MLP) return (3 * f + 1) / 2;
    if (c->expert == MOE_EXPERT_FACTORISED) return (3 * d * f - low * d + (low + 2 * d) / 2) / (low + 2 * d);
    return f;
}

/* Whether a balance loss is added: tokens choose by a softmax p, and the router has no balance loss
   of its own. */
static int wants_balance(const moe_router_config *c) {
    int by_tokens = c->select == MOE_SELECT_TOP_K || c->select == MOE_SELECT_TOP_P ||
                    c->select == MOE_SELECT_THRESHOLD || c->select == MOE_SELECT_GROUPED_TOP_K;
    return by_tokens && c->gate == MOE_GATE_SOFTMAX && c->loss_balance <= 0 && c->loss_importance <= 0 &&
           c->bias_rate <= 0;
}

/* The experts of one layer. */
static moe_status configure(const settings *s, const variant *v, moe_layer_config *c, moe_error *error) {
    char text[KEY];
    moe_status status;
    memset(c, 0, sizeof *c);
    if (*v->preset == '\0') {
        c->router.n_experts = 1;
        c->d_ff = int_of(s, TOP_K) * int_of(s, D_FF);
        return MOE_OK;
    }
    if ((status = moe_layer_preset(v->preset, c, error)) != MOE_OK) return status;
    c->router.n_experts = int_of(s, EXPERTS);
    if (c->router.top_k > 1) c->router.top_k = int_of(s, TOP_K);
    fill_in(s, v->settings, text, sizeof text);
    if ((status = moe_fields_apply(moe_layer_fields(), c, text, error)) != MOE_OK) return status;
    if (c->d_ff == 0) c->d_ff = fair_width(c, int_of(s, WIDTH), int_of(s, D_FF));
    if (wants_balance(&c->router)) c->router.loss_balance = (moe_real)s->value[BALANCE];
    /* shares of the tokens sum to K, those of the choices to 1: equal weights for both */
    if (c->router.loss_balance > 0 && c->router.balance_over == MOE_BALANCE_TOKENS)
        c->router.loss_balance /= (moe_real)c->router.top_k;
    return MOE_OK;
}

static moe_status build(const entry *e, int seed, moe_net *net, moe_error *error) {
    language_shape shape = {data.ids, int_of(&e->s, WIDTH), int_of(&e->s, LAYERS)};
    moe_layer_config experts[MAX_LAYERS];
    moe_status status = MOE_OK;
    int l, has = 0;
    for (l = 0; l < shape.layers && status == MOE_OK; l++) {
        const variant *v = variant_of_layer(&e->s, e->v, l);
        has |= v == e->v;
        status = configure(&e->s, v, &experts[l], error);
    }
    if (status == MOE_OK && !has)
        return language_error(error, MOE_ERR_CONFIG, "no layer would have it: more --layers, or an earlier --ac-first");
    return status == MOE_OK ? language_net(net, &shape, experts, (uint64_t)seed, error) : status;
}

/* ---- rows: kept in memory and in a file ---- */

static uint64_t fingerprint(uint64_t hash, const void *bytes, size_t size) {
    const unsigned char *b = (const unsigned char *)bytes;
    for (size_t i = 0; i < size; i++) hash = (hash ^ b[i]) * 1099511628211u;
    return hash;
}

/* Everything that determines the result of a run: settings, texts, and the router's definition. */
static void make_key(entry *e) {
    uint64_t router = 14695981039346656037u;
    size_t n = 0;
    for (int l = 0; l < int_of(&e->s, LAYERS); l++) {
        const variant *v = variant_of_layer(&e->s, e->v, l);
        const moe_preset *preset = moe_preset_find(v->preset);
        router = fingerprint(router, v->settings, strlen(v->settings) + 1);
        if (preset != NULL) router = fingerprint(router, preset->router, strlen(preset->router) + 1);
        if (preset != NULL) router = fingerprint(router, preset->layer, strlen(preset->layer) + 1);
    }
    for (int i = 0; i < N_SETTINGS; i++)
        n += (size_t)snprintf(e->key + n, sizeof e->key - n, "%s=%.6g ", setting_rows[i].name, e->s.value[i]);
    snprintf(e->key + n, sizeof e->key - n, "texts=%08lx router=%08lx", (unsigned long)(data.fingerprint & 0xffffffffu),
             (unsigned long)(router & 0xffffffffu));
}

static const row *find_row(const entry *e, int seed) {
    for (size_t i = 0; i < n_rows; i++)
        if (rows[i].seed == seed && strcmp(rows[i].router, e->v->name) == 0 && strcmp(rows[i].key, e->key) == 0)
            return &rows[i];
    return NULL;
}

static int keep_row(const row *r) {
    row *more = (row *)realloc(rows, (n_rows + 1) * sizeof *rows);
    if (more == NULL) return complain("out of memory");
    rows = more;
    rows[n_rows++] = *r;
    return 0;
}

static void write_header(char *line) {
    strcpy(line, "settings,router,seed,causal");
    for (int m = 0; m < N_METRICS; m++) strcat(strcat(line, ","), metrics[m].name);
    strcat(line, ",curve,fluctuation_by_layer\n");
}

static void write_row(char *line, const row *r) {
    int n = sprintf(line, "%s,%s,%d,%d", r->key, r->router, r->seed, r->causal);
    for (int m = 0; m < N_METRICS; m++)
        n += isnan(r->value[m]) ? sprintf(line + n, ",") : sprintf(line + n, ",%.9g", r->value[m]);
    sprintf(line + n, ",%s,%s\n", r->curve, r->layers);
}

/* Copies a field to text[room] and advances behind its end, which must be `end`. */
static int read_field(const char **at, char end, char *text, size_t room) {
    size_t length = strcspn(*at, ",\n");
    if (length >= room || (*at)[length] != end) return 0;
    memcpy(text, *at, length);
    text[length] = '\0';
    *at += length + 1;
    return 1;
}

static int read_number(const char **at, double *value) {
    char text[40], *end;
    if (!read_field(at, ',', text, sizeof text)) return 0;
    *value = *text == '\0' ? NONE : strtod(text, &end);
    return *text == '\0' || *end == '\0';
}

/* Parses a line of the file, complete or not. */
static int read_row(const char *line, row *r) {
    double number[2];
    if (!read_field(&line, ',', r->key, sizeof r->key) || !read_field(&line, ',', r->router, sizeof r->router))
        return 0;
    for (int i = 0; i < 2; i++)
        if (!read_number(&line, &number[i]) || !(number[i] >= 0 && number[i] <= 1e9)) return 0;
    r->seed = (int)number[0];
    r->causal = (int)number[1];
    for (int m = 0; m < N_METRICS; m++)
        if (!read_number(&line, &r->value[m])) return 0;
    return read_field(&line, ',', r->curve, sizeof r->curve) && read_field(&line, '\n', r->layers, sizeof r->layers);
}

/* Appends a line to the file in one write. After a failure nothing more is written: the next run
   removes an incomplete last line. */
static int append(const char *line) {
    static char buffer[LINE];
    FILE *f = csv_path != NULL ? fopen(csv_path, "ab") : NULL;
    int good = f != NULL;
    if (csv_path == NULL) return 0;
    if (f != NULL) setvbuf(f, buffer, _IOFBF, sizeof buffer);
    if (f != NULL) good = fputs(line, f) >= 0;
    if (f != NULL) good = fclose(f) == 0 && good;
    if (good) return 0;
    csv_failed = 1;
    fprintf(stderr, "compare: %s cannot be written: %s\n", csv_path, strerror(errno));
    return 1;
}

static moe_status write_again(void *ctx, moe_stream *stream) {
    const moe_buffer *good = (const moe_buffer *)ctx;
    return stream->write(stream->ctx, good->data, good->size);
}

/* Reads the lines behind the header and removes an incomplete last one, left by a stopped run. */
static int read_lines(moe_buffer *file, size_t at) {
    moe_buffer good = *file;
    moe_error error;
    char line[LINE];
    row r;
    for (int number = 2; at < file->size; number++) {
        const char *begin = (const char *)file->data + at, *end = (const char *)memchr(begin, '\n', file->size - at);
        size_t length = end != NULL ? (size_t)(end - begin) + 1 : file->size - at;
        int last = at + length == file->size, fits = length < sizeof line;
        if (fits) {
            memcpy(line, begin, length);
            line[length] = '\0';
        }
        if (fits && end != NULL && read_row(line, &r)) {
            if (keep_row(&r)) return 1;
        } else if (!last) {
            fprintf(stderr, "compare: %s:%d: not a row of this file\n", csv_path, number);
            return 1;
        } else {
            good.size = at;
            if (!quiet) fprintf(stderr, "compare: %s:%d: the last line is damaged and is left out\n", csv_path, number);
        }
        at += length;
    }
    if (good.size < file->size && moe_file_replace(csv_path, write_again, &good, &error) != MOE_OK)
        return complain(error.message);
    return 0;
}

static int read_csv(void) {
    char header[LINE];
    moe_buffer file = {0};
    moe_error error;
    int failed;
    FILE *f = csv_path != NULL ? fopen(csv_path, "rb") : NULL;
    write_header(header);
    if (f == NULL) return append(header);
    fclose(f);
    if (moe_file_read(csv_path, &file, &error) != MOE_OK) return complain(error.message);
    if (file.size < strlen(header) && memcmp(file.data, header, file.size) == 0) {
        /* new, or stopped in its first line */
        moe_buffer whole = {.data = (unsigned char *)header, .size = strlen(header)};
        failed = moe_file_replace(csv_path, write_again, &whole, &error) != MOE_OK && complain(error.message);
    } else if (file.size < strlen(header) || memcmp(file.data, header, strlen(header)) != 0) {
        fprintf(stderr, "compare: %s: its first line is not that of this program; name another file with --csv\n",
                csv_path);
        failed = 1;
    } else failed = read_lines(&file, strlen(header));
    moe_buffer_free(&file);
    return failed;
}

/* ---- texts ---- */

static moe_status make_sample(const language_text *text, const settings *s, size_t most, const char *what, sample *out,
                              moe_error *error) {
    size_t context = size_of(s, CONTEXT), n = most > context ? most / context * context : context;
    out->ids = (int32_t *)malloc(n * sizeof *out->ids);
    out->labels = (int32_t *)malloc(n * sizeof *out->labels);
    if (out->ids == NULL || out->labels == NULL) return language_no_memory(error);
    out->sequences = language_spread(text, n / context, context, out->ids, out->labels);
    if (out->sequences > 0) return MOE_OK;
    return language_error(error, MOE_ERR_ARGUMENT, "the %s text has %d tokens, a sequence has %d", what, (int)text->n,
                          (int)context);
}

/* A copy of the held-out sample in which tokens, as inputs and as targets, are replaced. Each draw
   is the same in every run. */
static moe_status contaminate(const settings *s, uint64_t draw, sample *out, moe_error *error) {
    size_t context = size_of(s, CONTEXT), n = data.held.sequences * context;
    moe_rng rng;
    moe_rng_seed(&rng, draw);
    *out = (sample){(int32_t *)malloc(n * sizeof *out->ids), (int32_t *)malloc(n * sizeof *out->labels),
                    data.held.sequences};
    if (out->ids == NULL || out->labels == NULL) return language_no_memory(error);
    for (size_t i = 0; i < n; i++) {
        if (i % context == 0)
            out->ids[i] = (double)moe_rng_uniform(&rng) < CONTAMINATION ? data.absent : data.held.ids[i];
        out->labels[i] = (double)moe_rng_uniform(&rng) < CONTAMINATION ? data.absent : data.held.labels[i];
        if ((i + 1) % context != 0) out->ids[i + 1] = out->labels[i];
    }
    return MOE_OK;
}

/* The first id that occurs in no text; a new id if all occur. */
static moe_status find_absent(const language_text *texts, int n, moe_error *error) {
    unsigned char *taken = (unsigned char *)calloc((size_t)data.language.size + 1, 1);
    if (taken == NULL) return language_no_memory(error);
    for (int t = 0; t < n; t++)
        for (size_t i = 0; i < texts[t].n; i++) taken[texts[t].ids[i]] = 1;
    for (data.absent = 0; taken[data.absent];) data.absent++;
    data.ids = data.absent < data.language.size ? data.language.size : data.language.size + 1;
    free(taken);
    return MOE_OK;
}

static moe_status read_data(const char *const *train, size_t n_train, const char *valid, const char *test,
                            const settings *s, moe_error *error) {
    const char *const *headers = example_headers();
    moe_buffer held = {0}, final = {0};
    language_text texts[3] = {{0}};
    moe_status status =
        n_train > 0 ? language_read(train, n_train, &data.bytes, error) : language_read(headers, 3, &data.bytes, error);
    if (status == MOE_OK)
        status = language_split(&data.bytes, PARTS, valid != NULL ? 0 : HELD_SHARE, &data.kept, &held, error);
    if (status == MOE_OK && valid != NULL) {
        moe_buffer_free(&held);
        status = language_read(&valid, 1, &held, error);
    }
    if (status == MOE_OK && test != NULL) status = language_read(&test, 1, &final, error);
    if (status == MOE_OK)
        status = language_learn(&data.language, &data.kept, int_of(s, WORDS), int_of(s, VOCABULARY), error);
    if (status == MOE_OK) status = language_encode(&data.language, &data.kept, &texts[0], error);
    if (status == MOE_OK) status = language_encode(&data.language, &held, &texts[1], error);
    if (status == MOE_OK) status = language_encode(&data.language, &final, &texts[2], error);
    if (status == MOE_OK && texts[0].n <= size_of(s, CONTEXT))
        status = language_error(error, MOE_ERR_ARGUMENT, "the training text is shorter than a sequence");
    if (status == MOE_OK) status = find_absent(texts, 3, error);
    if (status == MOE_OK) status = make_sample(&texts[1], s, size_of(s, HELD), "held-out", &data.held, error);
    if (status == MOE_OK && test != NULL)
        status = make_sample(&texts[2], s, 8 * size_of(s, HELD), "test", &data.test, error);
    for (uint64_t d = 0; d < DRAWS && status == MOE_OK; d++) status = contaminate(s, d + 1, &data.draws[d], error);
    data.fingerprint = 14695981039346656037u;
    for (int t = 0; t < 3 && status == MOE_OK; t++)
        data.fingerprint = fingerprint(data.fingerprint, texts[t].ids, texts[t].n * sizeof *texts[t].ids);
    data.train = texts[0];
    free(texts[1].ids);
    free(texts[2].ids);
    moe_buffer_free(&held);
    moe_buffer_free(&final);
    return status;
}

static void free_sample(sample *s) {
    free(s->ids);
    free(s->labels);
}

static void free_data(void) {
    free(data.language.word);
    free(data.train.ids);
    free_sample(&data.held);
    free_sample(&data.test);
    for (int d = 0; d < DRAWS; d++) free_sample(&data.draws[d]);
    moe_buffer_free(&data.bytes);
    moe_buffer_free(&data.kept);
    memset(&data, 0, sizeof data);
}

/* ---- what one evaluation sees ---- */

/* The routing of the held-out sample, by layer. */
typedef struct watch {
    int layers, context;
    size_t n_tokens;
    int routed[MAX_LAYERS];                        /* the layer has a router with comparable choices */
    int32_t *now[MAX_LAYERS], *before[MAX_LAYERS]; /* [n_tokens] first choices */
    moe_metrics metrics[MAX_LAYERS];
    void *memory[MAX_LAYERS];
    size_t size[MAX_LAYERS];
    double served[MAX_LAYERS], off_diagonal[MAX_LAYERS]; /* off_diagonal: NONE without a similarity matrix */
    double fluctuation[MAX_LAYERS];                      /* sum over comparisons */
    int n_evaluations;
} watch;

static const moe_router_config *router_of(const moe_net *net, int layer) {
    return &net->modules[language_module((size_t)layer)].layer.config.router;
}

static void watch_free(watch *w) {
    for (int l = 0; l < MAX_LAYERS; l++) {
        free(w->now[l]);
        free(w->before[l]);
        free(w->memory[l]);
    }
}

static moe_status watch_init(watch *w, const moe_net *net, const settings *s) {
    memset(w, 0, sizeof *w);
    w->layers = int_of(s, LAYERS);
    w->context = int_of(s, CONTEXT);
    w->n_tokens = data.held.sequences * size_of(s, CONTEXT);
    for (int l = 0; l < w->layers; l++) {
        moe_status status;
        w->routed[l] = net->modules[language_module((size_t)l)].kind == MOE_MODULE_MIXTURE &&
                       router_of(net, l)->select != MOE_SELECT_SOFT;
        if (!w->routed[l]) continue;
        if ((status = moe_metrics_size((size_t)router_of(net, l)->n_experts, 0, &w->size[l])) != MOE_OK) return status;
        w->memory[l] = malloc(w->size[l]);
        w->now[l] = (int32_t *)malloc(w->n_tokens * sizeof(int32_t));
        w->before[l] = (int32_t *)malloc(w->n_tokens * sizeof(int32_t));
        if (w->memory[l] == NULL || w->now[l] == NULL || w->before[l] == NULL) return MOE_ERR_MEMORY;
    }
    return MOE_OK;
}

/* Similarity of tokens i and j in the softmax of S. */
static double similarity(const moe_router_config *c, const moe_real *ui, const moe_real *uj) {
    double product = 0, ii = 0;
    double jj = 0;
    double tau = (double)(c->tau_schedule == MOE_TAU_SIMILARITY_TAU ? c->tau_end : c->similarity_tau);
    for (int q = 0; q < c->d_model; q++) {
        product += (double)(ui[q] * uj[q]);
        ii += (double)(ui[q] * ui[q]);
        jj += (double)(uj[q] * uj[q]);
    }
    if (c->similarity_scale == MOE_SIMILARITY_L2) product /= sqrt(ii * jj) + 1e-24;
    if (c->similarity_scale == MOE_SIMILARITY_RSQRT_D) product /= sqrt((double)c->d_model);
    return product / tau;
}

/* Mean over tokens of 1 - S_ii, S the causal similarity matrix at the end of training, computed
   from the router's input; NONE if S has another form. */
static double off_diagonal(const moe_router_config *c, const moe_routing *r, size_t context) {
    double sum = 0;
    size_t d = (size_t)c->d_model;
    if (c->refine != MOE_REFINE_SIMILARITY || !c->causal || c->similarity_learned || c->lower_entropy_only) return NONE;
    for (size_t i = 0; i < r->n_tokens; i++) {
        double own = similarity(c, r->u + i * d, r->u + i * d), others = 0; /* in units of the own term */
        for (size_t j = i - i % context; j < i; j++) others += exp(similarity(c, r->u + i * d, r->u + j * d) - own);
        sum += isinf(others) ? 1 : others / (1 + others);
    }
    return sum / (double)r->n_tokens;
}

static double served(const moe_routing *r) {
    double n = 0;
    for (size_t t = 0; t < r->n_tokens; t++) n += memchr(r->selected + t * r->n_experts, 1, r->n_experts) != NULL;
    return n;
}

static moe_status watch_layer(watch *w, int l, const moe_router_config *c, const moe_routing *r, size_t first) {
    moe_status status = moe_metrics_add(&w->metrics[l], r, NULL, NULL);
    if (status == MOE_OK) status = moe_routing_choices(r, 1, 1, w->now[l] + first);
    w->served[l] += served(r) / (double)w->n_tokens;
    if (first == 0) w->off_diagonal[l] = off_diagonal(c, r, (size_t)w->context);
    return status;
}

/* A pass over a sample: its loss and, unless w is NULL, the routing. */
typedef struct reading {
    const moe_net *net;
    const sample *set;
    watch *w;
    double sum, clean;
    size_t n, n_clean;
} reading;

static moe_status read_pass(void *ctx, const moe_net_pass *pass, size_t first) {
    reading *r = (reading *)ctx;
    moe_status status = MOE_OK;
    for (size_t t = 0; t < pass->n_tokens; t++) {
        int32_t label = r->set->labels[first + t];
        double loss = language_loss((size_t)data.ids, pass->y + t * (size_t)data.ids, label);
        r->sum += loss;
        r->n++;
        if (label != data.absent) {
            r->clean += loss;
            r->n_clean++;
        }
    }
    for (int l = 0; r->w != NULL && l < r->w->layers && status == MOE_OK; l++)
        if (r->w->routed[l])
            status = watch_layer(r->w, l, router_of(r->net, l),
                                 moe_net_routing(r->net, pass, language_module((size_t)l)), first);
    return status;
}

static moe_status read_sample(const moe_net *net, const sample *set, const settings *s, watch *w, reading *r,
                              moe_error *error) {
    moe_status status = MOE_OK;
    *r = (reading){net, set, w, 0, 0, 0, 0};
    for (int l = 0; w != NULL && l < w->layers && status == MOE_OK; l++) {
        if (w->routed[l])
            status =
                moe_metrics_init(&w->metrics[l], (size_t)router_of(net, l)->n_experts, 0, w->memory[l], w->size[l]);
        w->served[l] = 0;
        w->off_diagonal[l] = NONE;
    }
    if (status != MOE_OK) return language_error(error, status, "%s", moe_status_text(status));
    status = language_run(net, set->ids, set->sequences, size_of(s, CONTEXT), size_of(s, BATCH), read_pass, r, error);
    r->sum /= (double)r->n;
    r->clean /= (double)r->n_clean;
    return status;
}

/* An evaluation during training: loss and choices, compared with those of the previous
   evaluation. */
static moe_status evaluate(const moe_net *net, const settings *s, watch *w, double *loss, moe_error *error) {
    reading r;
    moe_status status = read_sample(net, &data.held, s, w, &r, error);
    for (int l = 0; l < w->layers && status == MOE_OK; l++) {
        double share = 0;
        int32_t *now = w->now[l];
        if (w->routed[l] && w->n_evaluations > 0)
            status = moe_fluctuation(w->n_tokens, w->before[l], now, NULL, &share);
        w->fluctuation[l] += share;
        w->now[l] = w->before[l];
        w->before[l] = now; /* before is now the latest */
    }
    w->n_evaluations++;
    *loss = r.sum;
    return status;
}

/* ---- one run ---- */

/* The progress of all runs, for the line that shows the time left. */
static struct {
    double steps_left, steps; /* steps left in all runs; steps since the start */
    int run, runs;
    time_t started, told;
} progress;

static void tell(const entry *e, int seed, int step, double loss, int over) {
    time_t now = time(NULL);
    double seconds = difftime(now, progress.started), speed = seconds > 0 ? progress.steps / seconds : 0;
    int left = speed > 0 ? (int)(progress.steps_left / speed) : 0;
    if (quiet || !isatty(2) || (now == progress.told && !over)) return;
    progress.told = now;
    if (over) fprintf(stderr, "\r%*s\r", 110, "");
    else
        fprintf(stderr, "\rrun %d of %d: %s, seed %d, step %d of %d, loss %.3f, %.0f tokens/s, %d:%02d left   ",
                progress.run, progress.runs, e->v->name, seed, step, int_of(&e->s, STEPS), loss,
                speed * e->s.value[BATCH] * e->s.value[CONTEXT], left / 60, left % 60);
}

static double seconds_since(clock_t start) { return (double)(clock() - start) / CLOCKS_PER_SEC; }

static moe_train_config recipe(const settings *s, int seed) {
    moe_train_config c;
    memset(&c, 0, sizeof c);
    c.batch = int_of(s, BATCH) * int_of(s, CONTEXT);
    c.total_steps = int_of(s, STEPS);
    c.warmup = int_of(s, STEPS) / 10;
    c.rate = (moe_real)s->value[RATE];
    c.seed = (uint64_t)seed;
    c.beta1 = (moe_real)recipes[int_of(s, AOE_RECIPE)].beta1;
    c.beta2 = (moe_real)recipes[int_of(s, AOE_RECIPE)].beta2;
    c.decay = (moe_real)recipes[int_of(s, AOE_RECIPE)].decay;
    c.clip = (moe_real)recipes[int_of(s, AOE_RECIPE)].clip;
    c.final_rate = (moe_real)recipes[int_of(s, AOE_RECIPE)].final_rate;
    return c;
}

static void note(char *text, const char *format, double a, double b) {
    size_t n = strlen(text);
    if (n + 40 < CURVE) snprintf(text + n, CURVE - n, format, a, b);
}

/* Adds an evaluation after `step` steps to the row. */
static moe_status record(const moe_net *net, const entry *e, int step, watch *w, row *r, moe_error *error) {
    double loss = 0;
    moe_status status = evaluate(net, &e->s, w, &loss, error);
    if (status != MOE_OK) return status;
    loss = rint(loss * 1e5) / 1e5; /* as in the curve */
    if (!(r->value[LOSS] <= loss)) r->value[LOSS] = loss;
    r->value[FINAL] = loss;
    note(r->curve, "%.0f:%.5f ", step, loss);
    return MOE_OK;
}

/* All steps of one network. Batches depend on the seed only, so that runs with the same seed see
   the same ones in the same order. */
static moe_status train(moe_trainer *trainer, const entry *e, int seed, watch *w, row *r, moe_error *error) {
    size_t n = size_of(&e->s, BATCH) * size_of(&e->s, CONTEXT);
    int steps = int_of(&e->s, STEPS), evaluations = int_of(&e->s, EVALUATIONS);
    int late = 0;
    int32_t *ids = (int32_t *)malloc(2 * n * sizeof *ids);
    double late_loss = 0, seconds = 0;
    moe_data batch;
    moe_step step;
    moe_rng rng;
    moe_status status = ids != NULL ? MOE_OK : language_no_memory(error);
    moe_rng_seed(&rng, ~(uint64_t)seed);
    memset(&batch, 0, sizeof batch);
    batch.n = n;
    batch.token_ids = ids;
    batch.labels = ids + n;
    batch.length = size_of(&e->s, CONTEXT);
    for (int i = 1; i <= steps && status == MOE_OK; i++) {
        clock_t start = clock();
        language_draw(&data.train, size_of(&e->s, BATCH), batch.length, &rng, ids, ids + n);
        if ((status = moe_trainer_step(trainer, &batch, &step, error)) != MOE_OK) break;
        seconds += seconds_since(start);
        if (i > steps - (steps + 9) / 10) {
            late_loss += (double)step.loss;
            late++;
        }
        if ((long)i * evaluations / steps != (long)(i - 1) * evaluations / steps)
            status = record(trainer->net, e, i, w, r, error);
        progress.steps++;
        progress.steps_left--;
        tell(e, seed, i, (double)step.loss, 0);
        if (stopped) status = MOE_ERR_STOPPED;
    }
    r->value[TRAIN] = late_loss / late;
    r->value[MS] = 1000 * seconds / steps;
    free(ids);
    return status;
}

/* Instability between two layers, from the latest first choices. */
static moe_status compare_layers(const moe_net *net, const watch *w, int l1, int l2, moe_instability_report *between) {
    size_t e1 = (size_t)router_of(net, l1)->n_experts, e2 = (size_t)router_of(net, l2)->n_experts;
    double *scratch = (double *)malloc((e1 + 1) * (e2 + 1) * sizeof *scratch);
    moe_status status = MOE_ERR_MEMORY;
    if (scratch != NULL)
        status = moe_instability(w->n_tokens, w->before[l1], e1, w->before[l2], e2, NULL, scratch, between);
    free(scratch);
    return status;
}

typedef struct mean {
    double sum[N_METRICS];
    int n[N_METRICS];
} mean;

static void add(mean *m, int metric, double value) {
    if (!isnan(value)) {
        m->sum[metric] += value;
        m->n[metric]++;
    }
}

/* Means over the layers that have a router. */
static moe_status report_layers(const moe_net *net, watch *w, row *r) {
    moe_status status = MOE_OK;
    mean m = {{0}, {0}};
    for (int l = 0, last = -1; l < w->layers && status == MOE_OK; l++) {
        moe_report report;
        moe_instability_report between;
        double fluctuation = w->n_evaluations > 1 ? w->fluctuation[l] / (w->n_evaluations - 1) : NONE;
        if (!w->routed[l]) continue;
        if ((status = moe_metrics_report(&w->metrics[l], &report)) != MOE_OK) break;
        add(&m, ENTROPY, report.confidence_entropy);
        add(&m, DROPPED, report.dropped_share);
        add(&m, LOAD_ENTROPY, report.load_entropy);
        add(&m, LOAD_MAX, report.load_max_over_mean);
        add(&m, SERVED, w->served[l]);
        add(&m, OFF_DIAGONAL, w->off_diagonal[l]);
        add(&m, FLUCTUATION, fluctuation);
        if (!isnan(fluctuation)) note(r->layers, "%.0f:%.4f ", l + 1, fluctuation);
        if (last >= 0 && (status = compare_layers(net, w, last, l, &between)) == MOE_OK) {
            add(&m, INSTABILITY, between.instability);
            add(&m, CHANCE, between.chance);
        }
        last = l;
    }
    for (int i = FLUCTUATION; i <= OFF_DIAGONAL; i++)
        if (m.n[i] > 0) r->value[i] = m.sum[i] / m.n[i];
    return status;
}

/* Measured once, with the trained network: contaminated and test text, the routers' reports. */
static moe_status finish_row(const moe_net *net, const settings *s, watch *w, row *r, moe_error *error) {
    reading one;
    double all = 0, clean = 0;
    size_t used = 0;
    moe_status status = report_layers(net, w, r);
    if (status != MOE_OK) return language_error(error, status, "routing: %s", moe_status_text(status));
    for (int d = 0; d < DRAWS && status == MOE_OK; d++) {
        status = read_sample(net, &data.draws[d], s, NULL, &one, error);
        all += one.sum / DRAWS;
        clean += one.clean / DRAWS;
    }
    if (status == MOE_OK) {
        r->value[CONTAMINATED] = all;
        r->value[CLEAN] = clean;
    }
    if (status == MOE_OK && data.test.sequences > 0 &&
        (status = read_sample(net, &data.test, s, NULL, &one, error)) == MOE_OK)
        r->value[TEST] = one.sum;
    r->value[PARAMETERS] = (double)moe_net_parameter_count(net, &used);
    r->value[ACTIVE] = (double)used;
    r->causal = moe_net_decode_size(net, 1, 1, NULL, NULL, NULL) == MOE_OK;
    return status;
}

/* The last trained network whose tensors others use. */
static struct {
    moe_net net;
    char key[KEY];
    int seed;
} donor;

/* Copies tensors of the same name and size; those of different routers remain unchanged. */
static void take_tensors(moe_net *net, const moe_net *from) {
    for (size_t i = 0; i < net->n_tensors; i++) {
        moe_tensor t;
        if (moe_net_find(from, net->tensors[i].name, &t) != MOE_OK || t.count != net->tensors[i].count) continue;
        memcpy(net->tensors[i].data, t.data, t.count * sizeof *t.data);
    }
}

static moe_status train_net(const entry *e, int seed, moe_net *net, watch *w, row *r, moe_error *error) {
    moe_train_config config = recipe(&e->s, seed);
    moe_trainer trainer = {0};
    moe_status status = moe_trainer_init(&trainer, net, &config, error);
    if (status == MOE_OK) status = train(&trainer, e, seed, w, r, error);
    moe_trainer_free(&trainer);
    return status;
}

static int is_taken_from(const variant *v) {
    for (const variant *other = variants; other->name != NULL; other++)
        if (strcmp(other->takes, v->name) == 0) return 1;
    return 0;
}

static moe_status run(const entry *e, int seed, row *r, moe_error *error);

/* Makes sure that the trained network of e->v->takes exists. */
static moe_status need_donor(const entry *e, int seed, moe_error *error) {
    entry from = *e;
    row ignored;
    from.v = find_variant(e->v->takes);
    make_key(&from);
    if (donor.seed == seed && strcmp(donor.key, from.key) == 0) return MOE_OK;
    progress.steps_left += e->s.value[STEPS];
    return run(&from, seed, &ignored, error);
}

/* One router with one seed, from the first step to the finished row. */
static moe_status run(const entry *e, int seed, row *r, moe_error *error) {
    moe_net net = {0};
    watch w = {0};
    moe_status status;
    memset(r, 0, sizeof *r);
    for (int m = 0; m < N_METRICS; m++) r->value[m] = NONE;
    strcpy(r->key, e->key);
    strcpy(r->router, e->v->name);
    r->seed = seed;
    if (*e->v->takes != '\0' && (status = need_donor(e, seed, error)) != MOE_OK) return status;
    if ((status = build(e, seed, &net, error)) != MOE_OK) return status;
    if ((status = watch_init(&w, &net, &e->s)) != MOE_OK) language_error(error, status, "%s", moe_status_text(status));
    else if (*e->v->takes != '\0') {
        take_tensors(&net, &donor.net);
        status = record(&net, e, int_of(&e->s, STEPS), &w, r, error);
    } else status = train_net(e, seed, &net, &w, r, error);
    if (status == MOE_OK) status = finish_row(&net, &e->s, &w, r, error);
    watch_free(&w);
    if (status == MOE_OK && is_taken_from(e->v)) {
        moe_net_free(&donor.net);
        donor.net = net;
        strcpy(donor.key, e->key);
        donor.seed = seed;
    } else moe_net_free(&net);
    return status;
}

/* ---- all runs ---- */

static int add_entry(const settings *s, const char *name) {
    entry *e = &entries[n_entries];
    for (int i = 0; i < n_entries; i++)
        if (strcmp(entries[i].v->name, name) == 0 && memcmp(&entries[i].s, s, sizeof *s) == 0) return 0;
    if (n_entries == MAX_ENTRIES) return complain("too many routers");
    e->s = *s;
    e->v = find_variant(name);
    if (e->v == NULL) {
        fprintf(stderr, "compare: there is no router %s; --list shows them all\n", name);
        return 1;
    }
    n_entries++;
    return 0;
}

/* Calls add_entry for every name in a list with commas. */
static int add_entries(const settings *s, const char *names) {
    char name[NAME];
    while (*names != '\0') {
        size_t length = strcspn(names, ",");
        snprintf(name, sizeof name, "%.*s", (int)length, names);
        if (add_entry(s, name)) return 1;
        names += length + (names[length] == ',');
    }
    return 0;
}

/* Makes the keys; builds every network once, so that invalid settings are reported before the first
   step. */
static int check_entries(void) {
    moe_net net;
    moe_error error;
    for (int i = 0; i < n_entries; i++) {
        make_key(&entries[i]);
        if (build(&entries[i], 1, &net, &error) != MOE_OK) {
            fprintf(stderr, "compare: %s: %s\n", entries[i].v->name, error.message);
            return 1;
        }
        moe_net_free(&net);
    }
    return 0;
}

static int run_one(const entry *e, int seed) {
    char line[LINE];
    row r;
    moe_error error = {0};
    moe_status status = run(e, seed, &r, &error);
    tell(e, seed, 0, 0, 1);
    if (status == MOE_ERR_STOPPED) return 1;
    if (status != MOE_OK) {
        fprintf(stderr, "compare: %s, seed %d: %s\n", e->v->name, seed, error.message);
        return 1;
    }
    write_row(line, &r);
    if (!quiet && isatty(2) == 0)
        fprintf(stderr, "%s, seed %d: loss %.4f, %.1f ms per step\n", r.router, seed, r.value[LOSS], r.value[MS]);
    return keep_row(&r) || append(line);
}

/* Runs every router with every seed, seeds outermost, so that a stopped run has pairs to compare.
   *ran: how many runs were missing. A router that fails does not stop the others. */
static int run_entries(int *ran) {
    int failed = 0;
    memset(&progress, 0, sizeof progress);
    progress.started = time(NULL);
    for (int s = 0; s < n_seeds; s++)
        for (int i = 0; i < n_entries; i++)
            if (find_row(&entries[i], seeds[s]) == NULL) {
                progress.runs++;
                progress.steps_left += *entries[i].v->takes != '\0' ? 0 : entries[i].s.value[STEPS];
            }
    for (int s = 0; s < n_seeds; s++)
        for (int i = 0; i < n_entries && !stopped && !csv_failed; i++) {
            if (find_row(&entries[i], seeds[s]) != NULL) continue;
            progress.run++;
            failed |= run_one(&entries[i], seeds[s]);
        }
    *ran = progress.run;
    if (stopped)
        fprintf(stderr, "compare: stopped in run %d of %d%s%s\n", progress.run, progress.runs,
                csv_path != NULL ? "; the same command goes on from " : "", csv_path != NULL ? csv_path : "");
    moe_net_free(&donor.net);
    memset(&donor, 0, sizeof donor);
    return failed;
}

/* ---- what rows say ---- */

/* The step at which a curve first reaches loss, interpolated between evaluations; NONE: never. */
static double reach(const char *curve, double loss) {
    double step, value, last_step = 0, last = (double)INFINITY;
    int used;
    for (; sscanf(curve, "%lf:%lf %n", &step, &value, &used) == 2; curve += used, last_step = step, last = value) {
        if (value > loss) continue;
        return isinf(last) ? step : last_step + (step - last_step) * (last - loss) / (last - value);
    }
    return NONE;
}

/* Steps by which r reaches the baseline's final loss earlier; if it never does, minus the
   baseline's lead to r's final loss. */
static double steps_saved(const row *r, const row *baseline) {
    double reached = reach(r->curve, baseline->value[FINAL]), other = reach(baseline->curve, r->value[FINAL]);
    double own_end = reach(baseline->curve, baseline->value[FINAL]), end = reach(r->curve, r->value[FINAL]);
    return !isnan(reached) ? own_end - reached : other - end;
}

static double measure(const row *r, int metric) {
    if (metric == RELATIVE) return r->value[INSTABILITY] / r->value[CHANCE];
    return metric < N_METRICS ? r->value[metric] : NONE;
}

static estimate level_of(const entry *e, int metric) {
    double x[MAX_SEEDS];
    int n = 0;
    for (int s = 0; s < n_seeds; s++) {
        const row *r = find_row(e, seeds[s]);
        if (r != NULL && !isnan(measure(r, metric))) x[n++] = measure(r, metric);
    }
    return estimate_of(x, n, 0);
}

/* Differences of two routers with the same seed. */
static estimate difference_of(const entry *e, const entry *baseline, int metric, double null) {
    double x[MAX_SEEDS], one;
    int n = 0;
    for (int s = 0; s < n_seeds; s++) {
        const row *r = find_row(e, seeds[s]), *b = find_row(baseline, seeds[s]);
        if (r == NULL || b == NULL) continue;
        one = metric == SAVED ? steps_saved(r, b) : measure(r, metric) - measure(b, metric);
        if (!isnan(one)) x[n++] = one;
    }
    return estimate_of(x, n, null);
}

/* Mean step at which the baseline's final loss was reached, over the seeds that reached it;
   *reached: how many. */
static double mean_reach(const entry *e, const entry *baseline, int *reached) {
    double sum = 0;
    *reached = 0;
    for (int s = 0; s < n_seeds; s++) {
        const row *r = find_row(e, seeds[s]), *b = find_row(baseline, seeds[s]);
        double step = r != NULL && b != NULL ? reach(r->curve, b->value[FINAL]) : NONE;
        if (!isnan(step)) {
            sum += step;
            ++*reached;
        }
    }
    return *reached > 0 ? sum / *reached : NONE;
}

/* Whether a router is scored without later tokens; 1 as long as nothing is known. */
static int is_causal(const entry *e) {
    for (int s = 0; s < n_seeds; s++)
        if (find_row(e, seeds[s]) != NULL) return find_row(e, seeds[s])->causal;
    return 1;
}

/* ---- tables ---- */

/* exp(loss) of the mean loss */
static double perplexity(estimate loss) { return exp(loss.mean); }

/* Prints the mean step at which the first router's final loss was reached, and the number of seeds
   if not all did. */
static void put_steps(const entry *e, int n) {
    int reached;
    double step = mean_reach(e, &entries[0], &reached);
    if (reached == 0 && n > 0) table_put("> %d", int_of(&e->s, STEPS));
    else if (reached < n) table_put("%.0f %d/%d", step, reached, n);
    else table_number(step, 0);
}

static void put_prediction(const entry *e) {
    estimate loss = level_of(e, LOSS), difference = difference_of(e, &entries[0], LOSS, 0);
    int comparable = e != &entries[0] && is_causal(e) && is_causal(&entries[0]);
    table_row();
    table_put("%s%s", e->v->name, is_causal(e) ? "" : " *");
    table_number(loss.mean, 4);
    table_number(loss.half, 4);
    table_signed(comparable ? difference.mean : NONE, 4);
    table_number(comparable ? difference.half : NONE, 4);
    table_number(perplexity(loss), 3);
    table_number(level_of(e, CONTAMINATED).mean, 4);
    table_number(level_of(e, CLEAN).mean, 4);
    table_number(level_of(e, TEST).mean, 4);
    put_steps(e, loss.n);
}

static void print_predictions(void) {
    int marked = 0;
    for (int i = 0; i < n_entries; i++) marked |= !is_causal(&entries[i]);
    printf("How well they predict: nats per token of held-out text with 95 %% t-intervals, %d seed%s. differs: from\n"
           "the first one, paired by seed; ppl: perplexity; contam.: 2.5 %% of the tokens are replaced by one that\n"
           "training has not seen, clean: there, where the target is not replaced; steps: to the loss where the\n"
           "first one ends, mean and number of seeds that come there.\n%s\n",
           n_seeds, n_seeds == 1 ? "" : "s",
           marked ? "*: sees later tokens, so that its loss is no language model's.\n" : "");
    table_new(1);
    table_heads("router|loss|+-|differs|+-|ppl|contam.|clean|test|steps");
    for (int i = 0; i < n_entries; i++) put_prediction(&entries[i]);
    table_print();
    table_report("How well they predict",
                 "Nats per token of held-out text with 95 % t-intervals; differs: from the first one, paired by seed.");
}

static void print_routing(void) {
    static const int columns[] = {FLUCTUATION, ENTROPY, LOAD_MAX,   INSTABILITY, CHANCE,
                                  DROPPED,     SERVED,  PARAMETERS, ACTIVE,      MS};
    enum { N = sizeof columns / sizeof columns[0] };
    table_new(1);
    table_heads("router|fluct.|entropy|load|instab.|chance|dropped|served|params|active|ms");
    for (int i = 0; i < n_entries; i++) {
        table_row();
        table_put("%s%s", entries[i].v->name, is_causal(&entries[i]) ? "" : " *");
        for (int c = 0; c < N; c++)
            table_number(level_of(&entries[i], columns[c]).mean,
                         metrics[columns[c]].decimals > 3 ? 3 : metrics[columns[c]].decimals);
    }
    printf("How they route, mean over layers. fluct.: share of first choices that change between evaluations;\n"
           "entropy: H(p); load: largest / mean; instab.: between layers, chance: of layers that have nothing to do\n"
           "with each other; shares of choices dropped and of tokens served; params: numbers learned, active: used\n"
           "by a token; ms: processor time of a step.\n\n");
    table_print();
    table_report(
        "How they route",
        "Mean over layers. fluct.: share of first choices that change between evaluations; load: largest / mean.");
}

static void print_notes(void) {
    const entry *best = NULL;
    for (int i = 0; i < n_entries; i++) {
        const entry *e = &entries[i];
        estimate mass = level_of(e, OFF_DIAGONAL);
        if (mass.n > 0) printf("%s: mass of the similarity matrix off its diagonal %.4f\n", e->v->name, mass.mean);
        if (is_causal(e) && !isnan(level_of(e, LOSS).mean) &&
            (best == NULL || level_of(e, LOSS).mean < level_of(best, LOSS).mean))
            best = e;
    }
    if (best != NULL) printf("least held-out loss: %s\n\n", best->v->name);
}

/* ---- claims ---- */

/* ---- the report's pictures ---- */

/* Loss over steps, the mean over seeds; routers with other evaluation steps than the first are left
   out. */
static void report_curves(void) {
    enum { POINTS = CURVE / 4 };
    static double steps[POINTS], sums[POINTS];
    const char **names = (const char **)report_grab((size_t)n_entries, sizeof *names);
    double *values = (double *)report_grab((size_t)n_entries * POINTS, sizeof *values);
    size_t n = 0, n_lines = 0;
    for (int i = 0; i < n_entries; i++) {
        size_t points = 0, same = 1;
        int found = 0, used;
        memset(sums, 0, sizeof sums);
        for (int s = 0; s < n_seeds; s++) {
            const row *r = find_row(&entries[i], seeds[s]);
            double step, value;
            points = 0;
            for (const char *at = r != NULL ? r->curve : "";
                 points < POINTS && sscanf(at, "%lf:%lf %n", &step, &value, &used) == 2; at += used, points++) {
                if (n_lines == 0 && found == 0) {
                    steps[points] = step;
                    n = points + 1;
                }
                same = same && points < n && fabs(steps[points] - step) < 0.5;
                sums[points] += value;
            }
            found += r != NULL;
        }
        if (found == 0 || !same || points != n) continue;
        for (size_t k = 0; k < n; k++) values[n_lines * POINTS + k] = sums[k] / found;
        names[n_lines++] = entries[i].v->name;
    }
    moe_figure *f = report_add(MOE_FIGURE_LINES, "Loss while training", n_lines, n);
    f->caption = "Held-out text, mean over seeds.";
    f->stride = POINTS;
    f->values = values;
    f->x = report_numbers(steps, n);
    f->row_names = names;
    f->value_label = "loss (nats per token)";
}

/* The difference of each router from the first one. */
static void report_differences(void) {
    const char **names = (const char **)report_grab((size_t)n_entries, sizeof *names);
    double *by = (double *)report_grab((size_t)n_entries, sizeof *by);
    double *half = (double *)report_grab((size_t)n_entries, sizeof *half);
    size_t n = 0;
    for (int i = 1; i < n_entries; i++) {
        estimate d = difference_of(&entries[i], &entries[0], LOSS, 0);
        if (is_causal(&entries[i]) && is_causal(&entries[0])) {
            names[n] = entries[i].v->name;
            by[n] = d.mean;
            half[n++] = d.half;
        }
    }
    if (n == 0) return;
    moe_figure *f = report_add(MOE_FIGURE_BARS, "Against the first router", n, 1);
    f->caption = "Loss minus that of the first router, paired by seed, with 95 % t-intervals; below 0 is better.";
    f->row_names = names;
    f->values = by;
    f->half_widths = half;
    f->value_label = "nats per token";
}

static int report_comparison(void) {
    if (report_path == NULL) return 0;
    if (n_entries > 0) {
        report_curves();
        report_differences();
    }
    return report_write_added("compare", "Routers compared");
}

static const entry *entry_named(const char *name) {
    for (int i = 0; i < n_entries; i++)
        if (strcmp(entries[i].v->name, name) == 0) return &entries[i];
    return NULL;
}

/* p: adjusted. */
static const char *verdict(const claim *c, estimate d, double p, int may_judge) {
    if (!may_judge) return "later tokens";
    if (d.n < VERDICT_SEEDS) return "too few seeds";
    if (!(p < LEVEL)) return "undecided";
    return (d.mean - c->margin) * c->sign > 0 ? "reproduced" : "opposite";
}

static int is_asked(const char *list, const char *name) {
    size_t length;
    for (; *list != '\0'; list += length + (list[length] == ',')) {
        length = strcspn(list, ",");
        if ((length == 3 && strncmp(list, "all", 3) == 0) ||
            (length == strlen(name) && strncmp(list, name, length) == 0))
            return 1;
    }
    return 0;
}

static void put_claim(const claim *c, estimate d, double p, int may_judge) {
    table_row();
    table_put("%s", c->treatment);
    table_put("%s", c->baseline);
    table_put("%s %s", metrics[c->metric].label, c->margin > 0 ? "kept" : c->sign < 0 ? "lower" : "higher");
    table_signed(d.mean, metrics[c->metric].decimals);
    table_number(d.half, metrics[c->metric].decimals);
    if (p < 0.0001) table_put("<.0001");
    else table_number(p, 4);
    table_put("%s", verdict(c, d, p, may_judge));
}

/* Prints the requested claims; p-values are Holm's over all of them. */
static void print_claims(const char *asked) {
    estimate d[N_CLAIMS];
    double p[N_CLAIMS];
    int may_judge[N_CLAIMS], judged = 0;
    for (int i = 0; i < N_CLAIMS; i++) {
        const entry *t = entry_named(claims[i].treatment), *b = entry_named(claims[i].baseline);
        p[i] = NONE;
        if (!is_asked(asked, claims[i].paper)) continue;
        d[i] = difference_of(t, b, claims[i].metric, claims[i].margin);
        may_judge[i] = !metrics[claims[i].metric].is_held_out || (is_causal(t) && is_causal(b));
        if (may_judge[i] && d[i].n >= VERDICT_SEEDS) {
            p[i] = d[i].p;
            judged++;
        }
    }
    holm(p, N_CLAIMS);
    printf("What papers claim and what %d seeds show at this size: treatment - baseline, paired by seed, with its\n"
           "own 95 %% t-interval; p by Holm over the %d comparisons that are judged here; reproduced or opposite\n"
           "where it is below 0.05.\n\n",
           n_seeds, judged);
    table_new(3);
    table_heads("treatment|baseline|claimed|differs by|+-|p|verdict");
    for (int i = 0; i < N_PAPERS; i++) {
        if (!is_asked(asked, papers[i].name)) continue;
        table_row();
        table_put("%s (%s)", papers[i].text, papers[i].source);
        for (int c = 0; c < N_CLAIMS; c++)
            if (strcmp(claims[c].paper, papers[i].name) == 0) put_claim(&claims[c], d[c], p[c], may_judge[c]);
    }
    table_print();
    table_report(
        "Claims of papers",
        "Treatment - baseline, paired by seed, with its 95 % t-interval; p by Holm over all that are judged here.");
}

static const char *paper_name(int i) { return i < N_PAPERS ? papers[i].name : NULL; }
static const char *study_name(int i) { return i < N_STUDIES ? studies[i].name : NULL; }

/* Whether every name in a list is known; reports the first that is not. */
static int are_known(const char *list, const char *(*name_of)(int i)) {
    size_t length;
    for (; *list != '\0'; list += length + (list[length] == ',')) {
        int i = 0;
        length = strcspn(list, ",");
        while (name_of(i) != NULL && (strlen(name_of(i)) != length || strncmp(name_of(i), list, length) != 0)) i++;
        if (name_of(i) == NULL && (length != 3 || strncmp(list, "all", 3) != 0)) {
            fprintf(stderr, "compare: there is no %.*s; --list shows claims and studies\n", (int)length, list);
            return 0;
        }
    }
    return 1;
}

static int add_claims(const settings *s, const char *asked) {
    if (!are_known(asked, paper_name)) return 1;
    for (int i = 0; i < N_CLAIMS; i++)
        if (is_asked(asked, claims[i].paper) && (add_entry(s, claims[i].baseline) || add_entry(s, claims[i].treatment)))
            return 1;
    return 0;
}

static int add_studies(const settings *s, const char *asked) {
    if (!are_known(asked, study_name)) return 1;
    for (int i = 0; i < N_STUDIES; i++)
        if (is_asked(asked, studies[i].name) && add_entries(s, studies[i].routers)) return 1;
    return 0;
}

/* ---- sweep ---- */

/* The settings and their multipliers. */
static const struct {
    int setting;
    double factor;
} sweeps[] = {{WIDTH, 0.5}, {WIDTH, 1},    {WIDTH, 2},   {EXPERTS, 0.25}, {EXPERTS, 0.5},
              {EXPERTS, 1}, {STEPS, 0.25}, {STEPS, 0.5}, {STEPS, 1}};
enum { N_SWEEPS = sizeof sweeps / sizeof sweeps[0] };

static settings swept(const settings *s, int i) {
    settings other = *s;
    double value = floor(s->value[sweeps[i].setting] * sweeps[i].factor);
    other.value[sweeps[i].setting] = fmax(value, setting_rows[sweeps[i].setting].least);
    if (other.value[STEPS] < other.value[EVALUATIONS]) other.value[EVALUATIONS] = other.value[STEPS];
    return other;
}

static int add_sweep(const settings *s, const char *name) {
    for (int i = 0; i < N_SWEEPS; i++) {
        settings other = swept(s, i);
        if (add_entry(&other, name)) return 1;
    }
    return 0;
}

static void print_sweep(const settings *s) {
    printf("%s over width, experts and steps: each block changes one of them.\n\n", entries[0].v->name);
    table_new(1);
    table_heads("changed|width|experts|steps|parameters|active|loss|+-|perplexity|test perplexity|ms/step");
    for (int i = 0; i < N_SWEEPS; i++) {
        settings other = swept(s, i);
        const entry *e = entries;
        while (memcmp(&e->s, &other, sizeof other) != 0) e++;
        table_row();
        table_put("%s", setting_rows[sweeps[i].setting].name);
        table_put("%d", int_of(&e->s, WIDTH));
        table_put("%d", int_of(&e->s, EXPERTS));
        table_put("%d", int_of(&e->s, STEPS));
        table_number(level_of(e, PARAMETERS).mean, 0);
        table_number(level_of(e, ACTIVE).mean, 0);
        table_number(level_of(e, LOSS).mean, 4);
        table_number(level_of(e, LOSS).half, 4);
        table_number(perplexity(level_of(e, LOSS)), 3);
        table_number(perplexity(level_of(e, TEST)), 3);
        table_number(level_of(e, MS).mean, 1);
    }
    table_print();
    table_report("Width, experts and steps", "Each block changes one of them.");
}

/* ---- the command line ---- */

static struct {
    settings s;
    const char *routers, *claim, *study, *train[MAX_FILES], *valid, *test;
    size_t n_train;
    int sweep, list, claims, check;
} options;

static int is_switch(const setting *s) { return s->least <= 0 && s->most <= 1; }

static void print_help(void) {
    fputs(help, stdout);
    for (int i = 0; i < N_SETTINGS; i++) {
        const setting *s = &setting_rows[i];
        if (is_switch(s)) printf("  --%-15s %s\n", s->name, s->about);
        else printf("  --%-12s N  %s (%.6g)\n", s->name, s->about, s->usual);
    }
}

/* Prints a name and its text, wrapped at 100 columns. */
static void print_about(const char *name, const char *text) {
    enum { FROM = 28, ROOM = 72 };
    printf("  %-*s", FROM - 2, name);
    while (strlen(text) > ROOM) {
        int n = ROOM;
        while (n > 0 && text[n] != ' ') n--;
        printf("%.*s\n%*s", n, text, FROM, "");
        text += n + 1;
    }
    printf("%s\n", text);
}

static void print_claim_names(void) {
    for (int i = 0; i < N_PAPERS; i++) {
        print_about(papers[i].name, papers[i].text);
        for (int c = 0; c < N_CLAIMS; c++)
            if (strcmp(claims[c].paper, papers[i].name) == 0)
                printf("  %-26s  %s against %s: %s %s\n", "", claims[c].treatment, claims[c].baseline,
                       metrics[claims[c].metric].label,
                       claims[c].margin > 0 ? "kept"
                       : claims[c].sign < 0 ? "lower"
                                            : "higher");
    }
}

static void print_list(void) {
    printf("routers, besides the presets (sh examples/run routers lists them):\n");
    for (const variant *v = variants; v->name != NULL; v++) print_about(v->name, v->about);
    printf("studies, for --ablate:\n");
    for (int i = 0; i < N_STUDIES; i++) print_about(studies[i].name, studies[i].about);
    printf("claims, for --claim:\n");
    print_claim_names();
    printf("a row of --csv; and what claims make of it:\n");
    for (int m = 0; m < N_MEASURES; m++)
        print_about(m < N_METRICS ? metrics[m].name : metrics[m].label, metrics[m].about);
}

static void take_seeds(int n) {
    for (n_seeds = 0; n_seeds < n; n_seeds++) seeds[n_seeds] = n_seeds + 1;
}

static int read_seeds(const char *text) {
    int is_list = strchr(text, ',') != NULL;
    char *end;
    for (n_seeds = 0; *text != '\0' && n_seeds < MAX_SEEDS; text = end + (*end == ',')) {
        long seed = strtol(text, &end, 10);
        if (end == text || (*end != '\0' && *end != ',') || seed < 0 || seed > 1000000000) return 1;
        for (int i = 0; i < n_seeds; i++)
            if (seeds[i] == (int)seed) return 1; /* would count twice */
        seeds[n_seeds++] = (int)seed;
    }
    if (is_list) return *text != '\0';
    if (n_seeds != 1 || seeds[0] < 1 || seeds[0] > MAX_SEEDS) return 1;
    take_seeds(seeds[0]);
    return 0;
}

/* Sets one of setting_rows; *used: it has a value. -1: unknown setting; 2: an invalid value, which
   was reported. */
static int read_setting(const char *word, const char *value, int *used) {
    for (int i = 0; i < N_SETTINGS; i++) {
        const setting *s = &setting_rows[i];
        char *end = NULL;
        if (strcmp(word + 2, s->name) != 0) continue;
        *used = !is_switch(s);
        if (!*used) {
            options.s.value[i] = 1;
            return 0;
        }
        options.s.value[i] = strtod(value, &end);
        if (end != value && *end == '\0' && options.s.value[i] >= s->least && options.s.value[i] <= s->most) {
            if (i != RATE && i != BALANCE) options.s.value[i] = floor(options.s.value[i]);
            return 0;
        }
        fprintf(stderr, "compare: %s %s: goes from %g to %g\n", word, value, s->least, s->most);
        return 2;
    }
    return -1;
}

static int read_options(int count, char **words) {
    static const struct {
        const char *name;
        int *flag;
        const char **text;
    } plain[] = {{"--markdown", &table.markdown, NULL},
                 {"--sweep", &options.sweep, NULL},
                 {"--list", &options.list, NULL},
                 {"--claims", &options.claims, NULL},
                 {"--check", &options.check, NULL},
                 {"--routers", NULL, &options.routers},
                 {"--claim", NULL, &options.claim},
                 {"--ablate", NULL, &options.study},
                 {"--csv", NULL, &csv_path},
                 {"--valid", NULL, &options.valid},
                 {"--test", NULL, &options.test},
                 {"--report", NULL, &report_path}};
    for (int i = 1, used; i < count; i += 1 + used) {
        const char *word = words[i], *value = i + 1 < count ? words[i + 1] : "";
        size_t p = 0;
        int read;
        used = 0;
        if (strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0) {
            print_help();
            exit(0);
        }
        while (p < sizeof plain / sizeof plain[0] && strcmp(plain[p].name, word) != 0) p++;
        if (p < sizeof plain / sizeof plain[0]) {
            if (plain[p].flag != NULL) *plain[p].flag = 1;
            else {
                *plain[p].text = value;
                used = 1;
            }
            read = used && *value == '\0';
        } else if (strcmp(word, "--seeds") == 0) {
            used = 1;
            read = read_seeds(value);
        } else if (strcmp(word, "--data") == 0) {
            used = 1;
            read = options.n_train == MAX_FILES || *value == '\0';
            if (!read) options.train[options.n_train++] = value;
        } else read = strncmp(word, "--", 2) == 0 ? read_setting(word, value, &used) : -1;
        if (read < 0) {
            fprintf(stderr, "compare: %s: no such option; -h explains\n", word);
            return 1;
        }
        if (read == 1) fprintf(stderr, "compare: %s: its value is missing or no good; -h explains\n", word);
        if (read > 0) return 1;
    }
    if ((options.claim != NULL) + (options.study != NULL) + options.sweep > 1)
        return complain("--claim, --ablate and --sweep go one at a time");
    return 0;
}

static void usual_settings(void) {
    memset(&options, 0, sizeof options);
    for (int i = 0; i < N_SETTINGS; i++) options.s.value[i] = setting_rows[i].usual;
    options.routers = "smoe,similarity_smoe,acmoe_running";
}

static int add_asked(void) {
    char first[NAME];
    n_entries = 0;
    snprintf(first, sizeof first, "%.*s", (int)strcspn(options.routers, ","), options.routers);
    if (options.claim != NULL) return add_claims(&options.s, options.claim);
    if (options.study != NULL) return add_studies(&options.s, options.study);
    if (options.sweep) return add_sweep(&options.s, first);
    return add_entries(&options.s, options.routers);
}

static void print_all(void) {
    const settings *s = &options.s;
    printf("%d %s of training text; %d layers of width %d, context %d, batch %d, %d experts; %d steps\n\n",
           (int)data.train.n, data.language.words ? "words" : "bytes", int_of(s, LAYERS), int_of(s, WIDTH),
           int_of(s, CONTEXT), int_of(s, BATCH), int_of(s, EXPERTS), int_of(s, STEPS));
    if (options.sweep) {
        print_sweep(&options.s);
        return;
    }
    print_predictions();
    print_routing();
    print_notes();
    if (options.claim != NULL) print_claims(options.claim);
}

static int perform(void) {
    moe_error error;
    int ran, failed;
    if (report_refused() != NULL) {
        fprintf(stderr, "compare: %s: %s\n", report_path, report_refused());
        return 1;
    }
    if (read_data(options.train, options.n_train, options.valid, options.test, &options.s, &error) != MOE_OK)
        return complain(error.message);
    if (add_asked() || check_entries() || read_csv()) return 1;
    failed = run_entries(&ran);
    print_all();
    if (report_comparison()) return 1;
    if (stopped) return 128 + stopped;
    return fflush(stdout) == 0 && !ferror(stdout) ? failed : complain("the output could not be written");
}

/* ---- compare --check ---- */

static int n_passed, n_failed;

static void check(int good, const char *what) {
    if (good) n_passed++;
    else {
        n_failed++;
        printf("failed: %s\n", what);
    }
}

static void near(double value, double expected, const char *what) {
    int good = fabs(value - expected) <= 1e-6 * (1 + fabs(expected));
    check(good, what);
    if (!good) printf("  %.9g, expected %.9g\n", value, expected);
}

static void check_statistics(void) {
    double p[] = {0.01, 0.04, NONE, 0.03, 0.9}, x[] = {1, 2, 4};
    double same[] = {2, 2};
    estimate e = estimate_of(x, 3, 0), with_margin = estimate_of(x, 3, 2.5);
    claim c = {"", "", "", LOSS, -1, 0};
    near(statistics_t_quantile(0.975, 1), 12.7062047362, "t quantile, 1 degree of freedom");
    near(statistics_t_quantile(0.975, 4), 2.77644510520, "t quantile, 4 degrees of freedom");
    near(statistics_t_quantile(0.995, 9), 3.24983554402, "t quantile, 9 degrees of freedom");
    near(statistics_t_p(2.04227245630, 30), 0.05, "t probability, 30 degrees of freedom");
    near(statistics_t_p(0, 7), 1, "t probability of 0");
    near(e.mean, 7.0 / 3, "mean");
    near(e.half, 4.30265272991 * 0.881917103688, "half of the interval");
    near(e.p, 1 - sqrt(7.0) / 3, "p of a mean");
    near(with_margin.p, statistics_t_p((7.0 / 3 - 2.5) / 0.881917103688, 2), "p against a margin");
    check(estimate_of(same, 2, 0).p == 0 && estimate_of(same, 2, 2).p == 1, "p without variance");
    holm(p, 5);
    near(p[0], 0.04, "Holm, the least");
    near(p[3], 0.09, "Holm, the second");
    near(p[1], 0.09, "Holm, not below the second");
    near(p[4], 0.9, "Holm, the largest");
    check(isnan(p[2]), "Holm leaves out what is not judged");
    near(reach("10:3 20:2 30:1 ", 1.5), 25, "steps to reach a loss");
    near(reach("10:3 20:2 ", 3.5), 10, "reached at the first evaluation");
    check(isnan(reach("10:3 20:2 ", 1)), "a loss that is never reached");
    check(strcmp(verdict(&c, e, 0.01, 1), "opposite") == 0, "verdict: opposite");
    c.sign = 1;
    check(strcmp(verdict(&c, e, 0.01, 1), "reproduced") == 0 && strncmp(verdict(&c, e, 0.06, 1), "undecided", 9) == 0,
          "verdict: reproduced, undecided");
    check(strcmp(verdict(&c, e, 0.01, 0), "later tokens") == 0, "no verdict for a router that sees later tokens");
    e.n = 2;
    check(strcmp(verdict(&c, e, 0.01, 1), "too few seeds") == 0, "no verdict from two seeds");
}

static void check_saved(void) {
    row fast, slow;
    memset(&fast, 0, sizeof fast);
    memset(&slow, 0, sizeof slow);
    strcpy(fast.curve, "10:3 20:2 30:1 ");
    strcpy(slow.curve, "10:4 20:3 30:2 ");
    fast.value[FINAL] = 1;
    slow.value[FINAL] = 2;
    near(steps_saved(&fast, &slow), 10, "steps saved");
    near(steps_saved(&slow, &fast), -10, "steps lost");
    near(steps_saved(&fast, &fast), 0, "no steps saved");
}

static void check_tables(void) {
    moe_error error;
    moe_net net;
    char what[100];
    for (const variant *v = variants; v->name != NULL; v++) {
        entry e = {.s = options.s, .v = v};
        int good;
        e.s.value[LAYERS] = 3;
        e.s.value[WIDTH] = 64;
        good = find_variant(v->name) == v && build(&e, 1, &net, &error) == MOE_OK;
        snprintf(what, sizeof what, "%s can be built", v->name);
        check(good, what);
        if (good) moe_net_free(&net);
        else printf("  %s\n", error.message);
    }
    for (int i = 0; i < N_CLAIMS; i++)
        check(find_variant(claims[i].treatment) != NULL && find_variant(claims[i].baseline) != NULL,
              claims[i].treatment);
    for (int i = 0; i < N_STUDIES; i++) {
        n_entries = 0;
        check(add_entries(&options.s, studies[i].routers) == 0, studies[i].name);
    }
}

static size_t parameters_of(const char *name) {
    entry e = {.s = options.s, .v = find_variant(name)};
    moe_net net = {0};
    size_t n = build(&e, 1, &net, NULL) == MOE_OK ? moe_net_parameter_count(&net, NULL) : 0;
    moe_net_free(&net);
    return n;
}

static void check_measures(void) {
    static const moe_real u[] = {1, 0, 0, 0, 0, 0};
    moe_router_config c = {.d_model = 2, .refine = MOE_REFINE_SIMILARITY, .similarity_tau = 1, .causal = 1};
    moe_routing r = {.n_tokens = 3, .u = u};
    double aoe = (double)parameters_of("aoe"), smoe = (double)parameters_of("smoe");
    near(off_diagonal(&c, &r, 3), (0 + 1.0 / 2 + 2.0 / 3) / 3, "mass off the diagonal of even rows");
    near(off_diagonal(&c, &r, 1), 0, "mass off the diagonal of single tokens");
    r.n_tokens = 1;
    c.causal = 0;
    check(isnan(off_diagonal(&c, &r, 1)), "no causal matrix, no mass");
    check(smoe > 0 && fabs(aoe - smoe) < 0.03 * smoe, "autonomy of experts has as many parameters as smoe");
}

static void check_contamination(void) {
    double n = 0, replaced = 0;
    double apart = 0;
    size_t context = size_of(&options.s, CONTEXT);
    for (int d = 0; d < DRAWS; d++)
        for (size_t i = 0; i < data.draws[d].sequences * context; i++, n++) {
            replaced += data.draws[d].labels[i] == data.absent;
            apart += data.draws[d].labels[i] != data.absent && data.draws[d].labels[i] != data.held.labels[i];
            apart += (i + 1) % context != 0 && data.draws[d].ids[i + 1] != data.draws[d].labels[i];
        }
    check(apart <= 0, "contaminated text is the held-out text otherwise");
    check(fabs(replaced / n - CONTAMINATION) < 5 * sqrt(CONTAMINATION / n), "2.5 % are replaced");
    for (size_t i = 0; i < data.train.n; i++) apart += data.train.ids[i] == data.absent;
    check(apart <= 0, "the replacement is absent from training");
}

/* Runs what is requested, with the rows of the file; returns the number of runs, -1 after an
   error. */
static int run_from_file(void) {
    int ran = -1;
    free(rows);
    rows = NULL;
    n_rows = 0;
    return read_csv() || run_entries(&ran) ? -1 : ran;
}

/* Truncates the file by `cut` bytes. */
static void damage(size_t cut) {
    moe_buffer file = {0};
    moe_error error;
    if (moe_file_read(csv_path, &file, &error) != MOE_OK) return;
    file.size -= cut;
    moe_file_replace(csv_path, write_again, &file, &error);
    moe_buffer_free(&file);
}

static void check_file(void) {
    row before, after;
    size_t runs;
    int ran = run_from_file();
    check(ran == 4, "two routers, two seeds: four runs");
    if (ran != 4) return;
    before = rows[3];
    check(run_from_file() == 0 && n_rows == 4, "rows of the file are not run again");
    damage(20);
    check(run_from_file() == 1 && n_rows == 4, "a damaged last line is run again");
    after = rows[3];
    before.value[MS] = after.value[MS] = 0;
    check(before.seed == after.seed && strcmp(before.router, after.router) == 0 &&
              strcmp(before.curve, after.curve) == 0 &&
              fabs(before.value[CONTAMINATED] - after.value[CONTAMINATED]) < 1e-8,
          "with the same result");
    check(run_from_file() == 0, "and stands in the file");
    check(before.causal && before.value[LOSS] < log(256.0) && before.value[FLUCTUATION] >= 0 &&
              before.value[SERVED] >= 1,
          "a row makes sense");
    runs = n_rows;
    entries[0].s.value[STEPS]++;
    make_key(&entries[0]);
    check(run_from_file() == 2 && n_rows == runs + 2, "other settings are other rows");
    damage(1);
    check(run_from_file() == 1, "a line without its end is run again");
}

static int check_all(void) {
    static const char name[] = "compare-check.csv";
    static const struct {
        int setting;
        double value;
    } small[] = {{WIDTH, 16}, {CONTEXT, 16},    {BATCH, 4},   {EXPERTS, 4}, {D_FF, 16},
                 {STEPS, 32}, {EVALUATIONS, 4}, {HELD, 1024}, {RATE, 0.005}};
    moe_error error;
    csv_path = name;
    quiet = 1;
    for (size_t i = 0; i < sizeof small / sizeof small[0]; i++) options.s.value[small[i].setting] = small[i].value;
    check(read_seeds("3,5,3") && read_seeds("3,x") && read_seeds("0") && !read_seeds("3,5") && !read_seeds("2"),
          "seeds");
    check_statistics();
    check_saved();
    if (read_data(options.train, options.n_train, NULL, NULL, &options.s, &error) != MOE_OK)
        return complain(error.message);
    check_contamination();
    check_measures();
    check_tables();
    remove(name);
    n_entries = 0;
    take_seeds(2);
    if (add_entries(&options.s, "smoe,acmoe_running") || check_entries()) n_failed++;
    else check_file();
    remove(name);
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed > 0;
}

int main(int count, char **words) {
    int failed;
    usual_settings();
    if (read_options(count, words)) return EXIT_USAGE;
    if (n_seeds == 0) take_seeds(options.claim != NULL ? CLAIM_SEEDS : TABLE_SEEDS);
    if (options.list) {
        print_list();
        return 0;
    }
    if (options.claims) {
        print_claim_names();
        return 0;
    }
    signal(SIGINT, stop);
    signal(SIGTERM, stop);
    failed = options.check ? check_all() : perform();
    free(rows);
    free_data();
    return failed;
}
