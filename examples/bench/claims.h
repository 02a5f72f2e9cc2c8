/* claims.h - what the bench measures, declared before it is measured: outcomes, arms (routers as
   text), worlds (data and budget) and claims. Tables only; bench.c reads them, and git log shows
   that they are older than the rows in results/.

   Sources: Nguyen, Tran, Nguyen, Baraniuk 2025, Improving routing in sparse mixture of experts with
   graph of tokens; Nielsen et al. 2025, Tight clusters make specialized experts; Lv et al. 2025,
   Autonomy-of-experts models; Li et al. 2024, LocMoE and LocMoE+; Krishnamurthy, Watkins, Gaertner
   2023, Improving expert specialization in mixture of experts, and Krishnamurthy's slides Towards
   interpretability and transferability in mixture of experts. */
#ifndef BENCH_CLAIMS_H
#define BENCH_CLAIMS_H

/* ---- outcomes: name, decimals, meaning. A run leaves out those that its world does not have ----
   */

#define BENCH_OUTCOMES(X) \
    X(LOSS, "loss", 4, "on text or worlds that training has not seen; squared error, or nats per token or label") \
    X(LOG_LOSS, "log_loss", 3, "ln of the squared error: a difference of 0.05 is 5 %") \
    X(CURVE, "curve", 3, "mean of ln(loss) over ten times in training: how fast it falls") \
    X(INFORMATION, "information", 3, "I(first expert; planted cluster, digits: answer), nats, less the chance value") \
    X(RECOVERY, "recovery", 3, \
      "share of tokens at the expert of their cluster, experts matched to clusters optimally") \
    X(FLIP, "flip", 3, "share of tokens whose first expert changes when noise is added to the input") \
    X(ENTROPY, "entropy", 3, "mean H(p), p normalized, nats") \
    X(ENTROPY_CHANGE, "entropy_change", 3, "mean of H(p) - H(r): what refinement does to a token's entropy") \
    X(LOAD_ENTROPY, "load_entropy", 3, "H of the experts' shares (as load_max; digits: of the mean gate), nats") \
    X(LOAD_MAX, "load_max", 3, "largest expert's share of the first choices (text: of the assignments)") \
    X(FAST_SHARE, "fast_share", 3, "share of the first choices that goes to expert 0") \
    X(TOGETHER, "together", 3, "share of classes one and two at the expert that has most of them") \
    X(THIRD, "third", 3, "share of class three at the other expert") \
    X(ROWS, "rows", 3, "token-expert assignments that experts computed, per token") \
    X(CLASS_LOSS, "class_loss", 3, "ln of the squared error of the class tokens alone") \
    X(REMOTE, "remote", 3, "share of the assignments whose expert is on another machine than the token") \
    X(EXTRA, "extra", 3, "experts with matrices per hard token, minus those per easy token") \
    X(WORK, "work", 3, "experts with matrices per token") \
    X(ERROR, "error", 3, "share of wrong answers") \
    X(ATTACKED, "attacked", 4, "the loss (text: with 2.5 % of the tokens replaced; digits: error under attack)") \
    X(FLUCTUATION, "fluctuation", 3, \
      "share of tokens whose first expert differs between the last two passes over the text") \
    X(INSTABILITY, "instability", 3, "between adjacent layers where the router acts, divided by its chance value") \
    X(TRAIN, "train", 4, "mean training loss of the last tenth of the steps") \
    X(ACTIVE, "active", 0, "parameters that a token uses") \
    X(MS, "ms", 2, "processor milliseconds of a training step; not part of a claim")

#define BENCH_VALUE(id, name, decimals, about) id,
enum { BENCH_OUTCOMES(BENCH_VALUE) N_OUTCOMES };
#define BENCH_ROW(id, name, decimals, about) {name, decimals, about},
static const struct {
    const char *name;
    int decimals;
    const char *about;
} outcomes[] = {BENCH_OUTCOMES(BENCH_ROW)};

/* ---- arms: a router as a preset and changes of it ----
   @name is replaced by a number of the run: balance, sqrt_d. An arm has the world's numbers of
   experts and choices unless it sets them. */

typedef struct arm {
    const char *name, *preset; /* preset "": one feed-forward as wide as the active experts */
    const char *settings;
    const char *after; /* settings that replace refinement after training, on frozen weights: the swap-in test */
    const char *where; /* text: one letter per layer, x this arm, . smoe, d dense, the last is repeated; digits.h */
    int forced;        /* 1: the oracle: a token's expert is that of its cluster, as wide as the K of others */
    double fast;       /* > 0: the learning rate of expert 0 is multiplied by it */
} arm;

#define BALANCED " loss_balance=@balance"
#define PAPER_ATTENTION "refine=attention attention_heads=min_entropy attention_u=output"

static const arm arms[] = {
    {"dense", "", "", "", "x", 0, 0},
    {"smoe", "smoe", "router_bias=1" BALANCED, "", "x", 0, 0},
    {"oracle", "smoe", "router_bias=1", "", "x", 1, 0},
    {"similarity", "similarity_smoe", "similarity_tau=1" BALANCED, "", "x", 0, 0},
    {"similarity_sqrt_d", "similarity_smoe", "similarity_tau=@sqrt_d" BALANCED, "", "x", 0, 0},
    {"similarity_swapped", "smoe", "router_bias=1" BALANCED, "refine=similarity similarity_tau=@sqrt_d", "x", 0, 0},
    {"similarity_lower", "smoe", "router_bias=1" BALANCED,
     "refine=similarity similarity_tau=@sqrt_d lower_entropy_only=1", "x", 0, 0},
    {"attention", "smoe", PAPER_ATTENTION BALANCED " weight=sum", "", "x", 0, 0},
    {"attention_sqrt_d", "smoe", PAPER_ATTENTION BALANCED " weight=sum attention_sigma=@sqrt_d", "", "x", 0, 0},
    {"attention_fixed", "smoe", "refine=attention attention_heads=fixed attention_u=output weight=sum" BALANCED, "",
     "x", 0, 0},
    {"xmoe", "xmoe", BALANCED, "", "x", 0, 0},
    {"similarity_xmoe", "similarity_xmoe", BALANCED, "", "x", 0, 0},
    {"frozen", "smoe_dropout", BALANCED, "", "x", 0, 0},
    {"frozen_2", "smoe_dropout", "k_end=0" BALANCED, "", "x", 0, 0},
    {"similarity_frozen", "similarity_smoe_dropout", BALANCED, "", "x", 0, 0},
    {"glam", "glam", BALANCED, "", "dx", 0, 0},
    {"similarity_glam", "similarity_glam", BALANCED, "", "dx", 0, 0},
    {"clustering", "acmoe", "ac_mode=running router_bias=1" BALANCED, "", "..x", 0, 0},
    {"clustering_call", "acmoe", "router_bias=1" BALANCED, "", "..x", 0, 0},
    {"clustering_variance", "acmoe", "ac_mode=running ac_spread=variance router_bias=1" BALANCED, "", "..x", 0, 0},
    {"clustering_random", "acmoe", "ac_mode=random router_bias=1" BALANCED, "", "..x", 0, 0},
    {"clustering_alternate", "acmoe", "ac_mode=running router_bias=1" BALANCED, "", ".x.", 0, 0},
    {"clustering_alternating", "acmoe", "ac_mode=running router_bias=1" BALANCED, "", ".x.x", 0, 0},
    {"factorised", "smoe", "expert=factorised router_bias=0" BALANCED, "", "x", 0, 0},
    {"autonomy", "aoe", "balance_over=pairs" BALANCED, "", "x", 0, 0},
    {"autonomy_alone", "aoe", "balance_over=pairs loss_balance=0", "", "x", 0, 0},
    {"factorised_alone", "smoe", "expert=factorised router_bias=0 loss_balance=0", "", "x", 0, 0},
    {"autonomy_top_p", "aoe_top_p", BALANCED, "", "x", 0, 0},
    {"autonomy_expert_choice", "aoe_expert_choice", "", "", "x", 0, 0},
    {"top1", "smoe", "top_k=1 weight=raw router_bias=0 capacity_factor=1.1 drop_order=priority" BALANCED, "", "x", 0,
     0},
    {"locmoe", "locmoe", BALANCED, "", "x", 0, 0},
    {"locmoe_no_locality", "locmoe", "loss_locality=0" BALANCED, "", "x", 0, 0},
    {"linear_locality", "locmoe", "score=linear loss_locality=0.1" BALANCED, "", "x", 0, 0},
    {"linear_no_locality", "locmoe", "score=linear loss_locality=0" BALANCED, "", "x", 0, 0},
    {"locmoe_plus", "locmoe_plus", BALANCED, "", "x", 0, 0},
    {"gate", "importance_gate", "loss_importance=0", "", "x", 0, 0},
    {"gate_fast", "importance_gate", "loss_importance=0", "", "x", 0, 10},
    {"dual", "dual_temperature", "loss_importance=0", "", "x", 0, 0},
    {"dual_fast", "dual_temperature", "loss_importance=0", "", "x", 0, 10},
    {"importance_fast", "importance_gate", "loss_importance=0.4", "", "x", 0, 10},
    {"attentive_gate_alone", "attentive_gate", "loss_importance=0", "", "x", 0, 0},
    {"attentive_gate", "attentive_gate", "loss_importance=0.2 unbiased=1", "", "x", 0, 0},
    {"similarity_gate", "similarity_gate", "loss_similarity_same=1 loss_similarity_diff=1", "", "x", 0, 0},
    {"importance", "importance_gate", "loss_importance=0.4", "", "x", 0, 0},
    {"pairs", "importance_gate", "loss_importance=0", "", "pairs", 0, 0},
    {"halves", "importance_gate", "loss_importance=0", "", "halves", 0, 0},
    {"random_shares", "importance_gate", "loss_importance=0", "", "random", 0, 0},
    {"zero_computation", "moe_pp",
     "n_experts=10 n_zero=1 n_copy=1 n_constant=0 router_residual=0 capacity_factor=0"
     " zero_tau=0.75" BALANCED,
     "", "x", 0, 0},
    {"threshold", "expert_threshold", "capacity_factor=2", "", "x", 0, 0},
    {"capacity", "smoe", "router_bias=1 capacity_factor=0.75 drop_order=priority" BALANCED, "", "x", 0, 0},
};
enum { N_ARMS = sizeof arms / sizeof arms[0] };

/* ---- worlds ---- */

enum { MEANS, SUBSPACES, TOY, ANISOTROPY, TOPICS, CLASS_TOKENS, MODULES, DIFFICULTY, TEXT, DIGITS, PATCHES };

typedef struct world {
    const char *name, *part; /* part: the file of its rows, results/PART.csv */
    int kind;
    double strength; /* what is varied; see worlds.h */
    int control;     /* 1: without the structure that the mechanism needs */
    int d, clusters, experts, top_k, d_ff, batch, steps, tuning_steps;
    const char *rates, *balances; /* the grid: each arm gets the pair of least loss over the tuning seeds */
    int tuning_seeds, seeds;      /* tuning: 1001, 1002, ...; judging: 1, 2, ... */
    const char *about;
} world;

#define GRID "0.003 0.01 0.03", "0 0.01 0.1"
#define HARD "0.003 0.01 0.03", "0.001 0.01 0.1"
#define EQUAL "0.003 0.01 0.03", "0.01"
#define FIXED "0.001 0.003 0.01", "0.01"
#define BYTES "0.001 0.003 0.01", "0.001 0.01 0.1"

/* Sizes of models: four widths by a number of experts, with the rates 0.08, 0.16 and 0.32 divided
   by the width. A run takes two passes over the text. scaling.h fits laws to them. */
#define SCALES(X) SCALES_OF(X, 4) SCALES_OF(X, 8) SCALES_OF(X, 16)
#define SCALES_OF(X, e) \
    X(12, e, "0.0067 0.0133 0.0267") X(20, e, "0.004 0.008 0.016") X(32, e, "0.0025 0.005 0.01") \
    X(48, e, "0.0017 0.0033 0.0067")
#define SCALE_WORLD(d, e, rates) \
    {"scale_" #d "_" #e, "scaling", TEXT, 0, 0, d, 0, e, 2, 2 * (d), 512, 4000, 1000, rates, "0.01", 2, 3, \
     "bytes, width " #d ", " #e " experts"},

static const world worlds[] = {
    {"means", "worlds", MEANS, 0.75, 0, 16, 3, 6, 2, 32, 64, 2000, 2000, EQUAL, 2, 20,
     "clusters differ in their mean: a linear router can tell them apart"},
    {"subspaces", "worlds", SUBSPACES, 8, 0, 16, 3, 6, 2, 32, 64, 2000, 2000, EQUAL, 2, 20,
     "clusters of mean 0 in subspaces of 8 dimensions: a linear router cannot, the norm of a projection can"},
    {"toy", "worlds", TOY, 0.16, 0, 64, 3, 2, 1, 64, 64, 1000, 1000, "0.001 0.003", "0", 2, 20,
     "the paper's toy: classes of means +1 and -1, later one of mean 0; two experts, one per token"},
    {"toy_easy", "worlds", TOY, 0.16, 1, 4, 3, 2, 1, 256, 64, 1000, 1000, "0.001 0.003", "0", 2, 20,
     "the same in 4 dimensions with wide experts, where the paper says that it is not observed"},
    {"anisotropy_1", "worlds", ANISOTROPY, 1, 1, 16, 4, 4, 2, 16, 64, 2000, 2000, GRID, 2, 20,
     "each cluster has 4 features of its own; all features scatter alike"},
    {"anisotropy_4", "worlds", ANISOTROPY, 4, 0, 16, 4, 4, 2, 16, 64, 2000, 2000, GRID, 2, 20,
     "the others scatter 4 times as far"},
    {"anisotropy_16", "worlds", ANISOTROPY, 16, 0, 16, 4, 4, 2, 16, 64, 2000, 2000, GRID, 2, 20,
     "the others scatter 16 times as far"},
    {"topics", "worlds", TOPICS, 0.5, 0, 16, 4, 4, 2, 16, 64, 2000, 2000, GRID, 2, 20,
     "16 tokens of a sequence share a topic that each shows weakly"},
    {"topics_clear", "worlds", TOPICS, 2, 0, 16, 4, 4, 2, 16, 64, 2000, 2000, GRID, 2, 20,
     "a token shows its topic clearly: nothing is left to refine"},
    {"topics_shuffled", "worlds", TOPICS, 0.5, 1, 16, 4, 4, 2, 16, 64, 2000, 2000, GRID, 2, 20,
     "every token has a topic of its own"},
    {"topics_attended", "worlds", TOPICS, 0.5, 2, 16, 4, 4, 2, 16, 64, 2000, 2000, GRID, 2, 20,
     "topics with an attention layer before the experts"},
    {"class_tokens", "worlds", CLASS_TOKENS, 3, 0, 32, 8, 8, 1, 16, 64, 2000, 2000, GRID, 2, 20,
     "one token in four carries a class along a block of features, the rest is noise; domains of classes by machine"},
    {"class_tokens_turned", "worlds", CLASS_TOKENS, 3, 1, 32, 8, 8, 1, 16, 64, 2000, 2000, GRID, 2, 20,
     "the classes lie along random directions; domains are mixed over the machines"},
    {"modules", "worlds", MODULES, 1, 0, 16, 4, 4, 4, 16, 64, 2000, 2000, "0.003 0.01 0.03", "0", 2, 20,
     "four clusters, each with a rule of its own for the label; all experts are mixed"},
    {"difficulty", "worlds", DIFFICULTY, 1, 0, 16, 2, 8, 2, 16, 64, 2000, 2000, HARD, 2, 20,
     "half of the tokens are to be copied, the others go through a random network"},
    {"difficulty_equal", "worlds", DIFFICULTY, 1, 1, 16, 2, 8, 2, 16, 64, 2000, 2000, HARD, 2, 20,
     "both halves go through the network"},
    {"bytes", "text", TEXT, 0, 0, 64, 0, 16, 2, 128, 512, 8000, 2000, BYTES, 2, 8,
     "bytes of WikiText's validation articles; judged on the test articles"},
    {"bytes_2000", "short", TEXT, 0, 0, 64, 0, 16, 2, 128, 512, 2000, 500, FIXED, 2, 6,
     "bytes with a quarter of the steps, the rate tuned, the balance weight not"},
    {"words", "words", TEXT, 1, 0, 64, 0, 16, 2, 128, 512, 8000, 2000, BYTES, 2, 8, "the same as words"},
    {"digits", "digits", DIGITS, 0, 0, 64, 10, 5, 5, 8, 32, 1000, 1000, "0.003 0.01 0.03", "0", 2, 12,
     "8 by 8 pixels, a fifth held out; all experts are mixed"},
    {"patches", "digits", PATCHES, 0, 0, 4, 10, 8, 2, 16, 256, 1500, 1500, "0.003 0.01", "0.01", 2, 12,
     "the digits as 16 patches each, one image per call, so that clusters are of patches inside an image"},
    SCALES(SCALE_WORLD)
};
enum { N_WORLDS = sizeof worlds / sizeof worlds[0] };

/* ---- claims ---- The arm's outcome minus the baseline's, paired by seed, has this sign and is at
   least the margin in magnitude. PRIMARY: one for each paper and family (planted worlds, natural
   data), with Holm's correction over papers. FAILS: a negative control, where the same prediction
   must not come true. KEEPS: the outcome is worse by less than the margin. paper's 1: the margin is
   the paper's effect in our unit; 0: the smallest effect that we would care about. */

enum { PRIMARY, SECONDARY, FAILS, KEEPS };

typedef struct claim {
    const char *id, *paper, *place, *text;
    const char *world, *arm, *baseline;
    int outcome, sign;
    double margin;
    int papers, kind;
} claim;

#define TOKENS "Nguyen et al. 2025"
#define CLUSTERS "Nielsen et al. 2025"
#define AUTONOMY "Lv et al. 2025"
#define LOCALITY "Li et al. 2024"
#define MODULAR "Krishnamurthy et al. 2023"
#define OTHER "others"

#define SCALE_CLAIM(d, e, rates) \
    {"scaling." #d "." #e, AUTONOMY, "table 5", "lower loss at width " #d " with " #e " experts", "scale_" #d "_" #e, \
     "autonomy", "smoe", LOSS, -1, 0.01, 0, SECONDARY},

static const claim claims[] = {
    /* planted worlds */
    {"aoe.toy", AUTONOMY, "appendix B", "one expert takes classes one and two", "toy", "autonomy_alone",
     "factorised_alone", TOGETHER, 1, 0.5, 1, PRIMARY},
    {"aoe.toy.third", AUTONOMY, "appendix B", "the idle expert takes class three", "toy", "autonomy_alone",
     "factorised_alone", THIRD, 1, 0.5, 1, SECONDARY},
    {"aoe.toy.easy", AUTONOMY, "appendix B", "not so where the task is too easy", "toy_easy", "autonomy_alone",
     "factorised_alone", TOGETHER, 1, 0.5, 1, FAILS},
    {"aoe.subspaces", AUTONOMY, "section 3.1", "experts know their clusters by the norm", "subspaces", "autonomy",
     "factorised", INFORMATION, 1, 0.1, 0, SECONDARY},
    {"aoe.means", AUTONOMY, "section 3.1", "no advantage where a linear router sees the clusters", "means", "autonomy",
     "factorised", INFORMATION, 1, 0.1, 0, FAILS},
    {"aoe.subspaces.loss", AUTONOMY, "table 2", "and so lower the loss", "subspaces", "autonomy", "factorised",
     LOG_LOSS, -1, 0.05, 0, SECONDARY},
    {"aoe.means.loss", AUTONOMY, "table 2", "the same for means", "means", "autonomy", "factorised", LOG_LOSS, -1, 0.05,
     0, SECONDARY},
    {"aoe.load", AUTONOMY, "figure 3", "load is more even at the same balance loss", "subspaces", "autonomy",
     "factorised", LOAD_ENTROPY, 1, 0.05, 0, SECONDARY},
    {"similarity.topics", TOKENS, "figure 3", "similar tokens keep their expert under noise", "topics",
     "similarity_sqrt_d", "smoe", FLIP, -1, 0.05, 0, PRIMARY},
    {"similarity.topics.loss", TOKENS, "table 1", "and the loss is lower", "topics", "similarity_sqrt_d", "smoe",
     LOG_LOSS, -1, 0.05, 0, SECONDARY},
    {"similarity.topics.recovery", TOKENS, "section 2", "and experts are those of the topics", "topics",
     "similarity_sqrt_d", "smoe", RECOVERY, 1, 0.05, 0, SECONDARY},
    {"similarity.topics.entropy", TOKENS, "figure 3", "and entropy is lower", "topics", "similarity_sqrt_d", "smoe",
     ENTROPY, -1, 0.05, 0, SECONDARY},
    {"similarity.tau_1", TOKENS, "table 9", "the same at tau 1: recovery", "topics", "similarity", "smoe", RECOVERY, 1,
     0.05, 0, SECONDARY},
    {"similarity.clear", TOKENS, "section 2", "no gain where a token shows its topic", "topics_clear",
     "similarity_sqrt_d", "smoe", RECOVERY, 1, 0.05, 0, FAILS},
    {"similarity.shuffled", TOKENS, "section 2", "no gain without shared topics", "topics_shuffled",
     "similarity_sqrt_d", "smoe", RECOVERY, 1, 0.05, 0, FAILS},
    {"similarity.shuffled.loss", TOKENS, "table 1", "no lower loss without shared topics", "topics_shuffled",
     "similarity_sqrt_d", "smoe", LOG_LOSS, -1, 0.05, 0, FAILS},
    {"similarity.swapped", TOKENS, "section 2", "refinement put into a trained network steadies it", "topics",
     "similarity_swapped", "smoe", FLIP, -1, 0.05, 0, SECONDARY},
    {"similarity.swapped.recovery", TOKENS, "section 2", "and recovers topics", "topics", "similarity_swapped", "smoe",
     RECOVERY, 1, 0.05, 0, SECONDARY},
    {"similarity.proposition", TOKENS, "proposition 1", "over tokens of lower entropy, refinement lowers it", "topics",
     "similarity_lower", "smoe", ENTROPY_CHANGE, -1, 0.05, 0, SECONDARY},
    {"attention.topics", TOKENS, "figure 3", "attention-aware routing steadies choices", "topics_attended",
     "attention_sqrt_d", "smoe", FLIP, -1, 0.05, 0, SECONDARY},
    {"attention.topics.loss", TOKENS, "table 1", "and the loss is lower", "topics_attended", "attention_sqrt_d", "smoe",
     LOG_LOSS, -1, 0.05, 0, SECONDARY},
    {"attention.sigma_1", TOKENS, "table 1", "the same at sigma 1", "topics_attended", "attention", "smoe", LOG_LOSS,
     -1, 0.05, 0, SECONDARY},
    {"clustering.16", CLUSTERS, "lemma 1", "scaling by dispersion finds clusters of anisotropy 16", "anisotropy_16",
     "clustering", "smoe", RECOVERY, 1, 0.05, 0, PRIMARY},
    {"clustering.4", CLUSTERS, "lemma 1", "of anisotropy 4", "anisotropy_4", "clustering", "smoe", RECOVERY, 1, 0.05, 0,
     SECONDARY},
    {"clustering.1", CLUSTERS, "lemma 1", "no gain where all features scatter alike", "anisotropy_1", "clustering",
     "smoe", RECOVERY, 1, 0.05, 0, FAILS},
    {"clustering.loss", CLUSTERS, "table 1", "and the loss is lower", "anisotropy_16", "clustering", "smoe", LOG_LOSS,
     -1, 0.05, 0, SECONDARY},
    {"clustering.curve", CLUSTERS, "proposition 2", "and falls faster", "anisotropy_16", "clustering", "smoe", CURVE,
     -1, 0.05, 0, SECONDARY},
    {"clustering.noise", CLUSTERS, "proposition 1", "and assignments withstand noise", "anisotropy_16", "clustering",
     "smoe", FLIP, -1, 0.05, 0, SECONDARY},
    {"clustering.random", CLUSTERS, "table 13", "dispersion beats random scaling", "anisotropy_16", "clustering",
     "clustering_random", RECOVERY, 1, 0.05, 0, SECONDARY},
    {"clustering.variance", CLUSTERS, "table 9", "mean absolute deviation beats variance", "anisotropy_16",
     "clustering", "clustering_variance", RECOVERY, 1, 0.05, 0, SECONDARY},
    {"locmoe_plus.rows", LOCALITY, "section 4.2", "60 % fewer rows than top-1 at factor 1.1", "class_tokens",
     "locmoe_plus", "top1", ROWS, -1, 0.6, 1, PRIMARY},
    {"locmoe_plus.loss", LOCALITY, "figure 3", "and class tokens are served as well", "class_tokens", "locmoe_plus",
     "top1", CLASS_LOSS, -1, 0.05, 0, KEEPS},
    {"locmoe_plus.turned", LOCALITY, "section 3.3", "the same where classes lie along random directions",
     "class_tokens_turned", "locmoe_plus", "top1", CLASS_LOSS, -1, 0.05, 0, KEEPS},
    {"locmoe.locality", LOCALITY, "section 3.2", "the locality loss keeps tokens on their machine", "class_tokens",
     "linear_locality", "linear_no_locality", REMOTE, -1, 0.1, 0, SECONDARY},
    {"locmoe.locality.grap", LOCALITY, "section 3.2", "the same with GrAP", "class_tokens", "locmoe",
     "locmoe_no_locality", REMOTE, -1, 0.1, 0, SECONDARY},
    {"locmoe.locality.mixed", LOCALITY, "section 3.2", "not where the machines have the same tokens",
     "class_tokens_turned", "linear_locality", "linear_no_locality", REMOTE, -1, 0.1, 0, FAILS},
    {"dual.fast", MODULAR, "slides", "dual temperature keeps a fast expert from taking all", "modules", "dual_fast",
     "gate_fast", LOAD_MAX, -1, 0.1, 0, PRIMARY},
    {"dual.fast.recovery", MODULAR, "slides", "and experts are the modules", "modules", "dual_fast", "gate_fast",
     RECOVERY, 1, 0.1, 0, SECONDARY},
    {"fast", MODULAR, "slides", "an expert with ten times the learning rate takes most samples", "modules", "gate_fast",
     "gate", FAST_SHARE, 1, 0.25, 0, SECONDARY},
    {"dual.equal", MODULAR, "slides", "dual temperature changes no load at equal rates", "modules", "dual", "gate",
     LOAD_MAX, -1, 0.1, 0, FAILS},
    {"importance.fast", MODULAR, "slides", "the importance loss keeps a fast expert from taking all", "modules",
     "importance_fast", "gate_fast", LOAD_MAX, -1, 0.1, 0, SECONDARY},
    {"attentive", MODULAR, "slides", "the attentive gate with importance finds modules", "modules", "attentive_gate",
     "gate", INFORMATION, 1, 0.1, 0, SECONDARY},
    {"attentive.alone", MODULAR, "slides", "the attentive gate alone finds modules", "modules", "attentive_gate_alone",
     "gate", INFORMATION, 1, 0.1, 0, SECONDARY},
    {"similarity_gate", MODULAR, "slides", "the similarity loss finds modules", "modules", "similarity_gate", "gate",
     INFORMATION, 1, 0.1, 0, SECONDARY},
    {"zero.extra", OTHER, "Jin et al. 2024", "copy experts take the easy tokens", "difficulty", "zero_computation",
     "smoe", EXTRA, 1, 0.2, 0, SECONDARY},
    {"zero.equal", OTHER, "Jin et al. 2024", "not where all tokens are hard", "difficulty_equal", "zero_computation",
     "smoe", EXTRA, 1, 0.2, 0, FAILS},
    {"zero.loss", OTHER, "Jin et al. 2024", "and the loss is no worse, with fewer experts per token", "difficulty",
     "zero_computation", "smoe", LOG_LOSS, -1, 0.05, 0, KEEPS},
    {"threshold.extra", OTHER, "2026, Expert threshold routing", "hard tokens get more experts", "difficulty",
     "threshold", "smoe", EXTRA, 1, 0.2, 0, SECONDARY},
    {"capacity.loss", OTHER, "", "a capacity of 3/4 costs no loss where half is to be copied", "difficulty", "capacity",
     "smoe", LOG_LOSS, -1, 0.05, 0, KEEPS},
    {"capacity.equal", OTHER, "", "the same where all tokens are hard", "difficulty_equal", "capacity", "smoe",
     LOG_LOSS, -1, 0.05, 0, KEEPS},
    /* natural data; perplexities per word are turned into nats per byte: ln(P' / P) / 5.2 */
    {"text.similarity", TOKENS, "table 1", "similarity-aware routing lowers perplexity, 34.84 to 32.03", "bytes",
     "similarity", "smoe", LOSS, -1, 0.016, 1, PRIMARY},
    {"text.attention", TOKENS, "table 1", "attention-aware routing does, 34.84 to 32.23", "bytes", "attention", "smoe",
     LOSS, -1, 0.015, 1, SECONDARY},
    {"text.similarity.attacked", TOKENS, "table 1", "also under word swaps", "bytes", "similarity", "smoe", ATTACKED,
     -1, 0.016, 0, SECONDARY},
    {"text.similarity.fluctuation", TOKENS, "figure 3", "and choices fluctuate less", "bytes", "similarity", "smoe",
     FLUCTUATION, -1, 0.05, 0, SECONDARY},
    {"text.attention.fluctuation", TOKENS, "figure 3", "also attention-aware ones", "bytes", "attention", "smoe",
     FLUCTUATION, -1, 0.05, 0, SECONDARY},
    {"text.similarity.entropy", TOKENS, "figure 3", "and entropy falls", "bytes", "similarity", "smoe", ENTROPY, -1,
     0.1, 0, SECONDARY},
    {"text.similarity.xmoe", TOKENS, "table 1", "similarity over X-MoE", "bytes", "similarity_xmoe", "xmoe", LOSS, -1,
     0.008, 1, SECONDARY},
    {"text.similarity.frozen", TOKENS, "table 1", "similarity with 2 experts over a frozen router with all 16",
     "bytes", "similarity_frozen", "frozen", LOSS, -1, 0.0055, 1, SECONDARY},
    {"text.similarity.frozen_2", TOKENS, "table 1", "similarity over a frozen router, both with 2 experts", "bytes",
     "similarity_frozen", "frozen_2", LOSS, -1, 0.0055, 1, SECONDARY},
    {"text.similarity.glam", TOKENS, "table 1", "similarity over GLaM", "bytes", "similarity_glam", "glam", LOSS, -1,
     0.016, 0, SECONDARY},
    {"text.clustering", CLUSTERS, "table 1", "adaptive clustering lowers perplexity, 35.48 to 34.42", "bytes",
     "clustering", "smoe", LOSS, -1, 0.006, 1, PRIMARY},
    {"text.clustering.attacked", CLUSTERS, "table 2", "also attacked, 48.12 to 47.61", "bytes", "clustering", "smoe",
     ATTACKED, -1, 0.002, 1, SECONDARY},
    {"text.clustering.instability", CLUSTERS, "figure 5", "and instability falls from 60 % to under 20 %", "bytes",
     "clustering", "smoe", INSTABILITY, -1, 0.4, 1, SECONDARY},
    {"text.clustering.alternate", CLUSTERS, "table 10", "in the second of the four layers alone",
     "bytes", "clustering_alternate", "smoe", LOSS, -1, 0.006, 0, SECONDARY},
    {"text.clustering.alternating", CLUSTERS, "table 10", "in alternate layers, the second and the fourth", "bytes",
     "clustering_alternating", "smoe", LOSS, -1, 0.006, 0, SECONDARY},
    {"text.clustering.variance", CLUSTERS, "table 9", "mean absolute deviation beats variance", "bytes", "clustering",
     "clustering_variance", LOSS, -1, 0.003, 0, SECONDARY},
    {"text.clustering.random", CLUSTERS, "table 13", "and random scaling", "bytes", "clustering", "clustering_random",
     LOSS, -1, 0.003, 0, SECONDARY},
    {"text.aoe", AUTONOMY, "figure 2", "autonomy of experts lowers the loss at equal parameters", "bytes", "autonomy",
     "smoe", LOSS, -1, 0.01, 0, PRIMARY},
    {"text.aoe.alone", AUTONOMY, "table 2", "also without a balance loss", "bytes", "autonomy_alone", "smoe", LOSS, -1,
     0.01, 0, SECONDARY},
    {"text.aoe.factorised", AUTONOMY, "table 2", "not because experts are factorised", "bytes", "autonomy",
     "factorised", LOSS, -1, 0.01, 0, SECONDARY},
    {"text.aoe.load", AUTONOMY, "figure 3", "load is more even at the same balance loss", "bytes", "autonomy", "smoe",
     LOAD_ENTROPY, 1, 0.02, 0, SECONDARY},
    {"text.aoe.confidence", AUTONOMY, "figure 3", "and the choice more confident", "bytes", "autonomy", "smoe", ENTROPY,
     -1, 0.1, 0, SECONDARY},
    {"text.aoe.top_p", AUTONOMY, "table 3", "also by top-p", "bytes", "autonomy_top_p", "smoe", LOSS, -1, 0.01, 0,
     SECONDARY},
    {"text.locmoe_plus.rows", LOCALITY, "section 4.2", "60 % fewer rows than top-1 at factor 1.1", "bytes",
     "locmoe_plus", "top1", ROWS, -1, 0.6, 1, PRIMARY},
    {"text.locmoe_plus.train", LOCALITY, "figure 3", "and the training loss is kept", "bytes", "locmoe_plus", "top1",
     TRAIN, -1, 0.01, 0, KEEPS},
    {"text.locmoe.rows", LOCALITY, "section 4.2", "LocMoE computes fewer rows", "bytes", "locmoe", "top1", ROWS, -1,
     0.1, 0, SECONDARY},
    {"text.sparsity", OTHER, "Shazeer et al. 2017", "experts beat a dense network of equal active size", "bytes",
     "smoe", "dense", LOSS, -1, 0.02, 0, SECONDARY},
    {"short.similarity", TOKENS, "table 1", "similarity-aware routing lowers perplexity", "bytes_2000", "similarity",
     "smoe", LOSS, -1, 0.016, 1, SECONDARY},
    {"short.similarity.fluctuation", TOKENS, "figure 3", "and choices fluctuate less", "bytes_2000", "similarity",
     "smoe", FLUCTUATION, -1, 0.05, 0, SECONDARY},
    {"short.clustering", CLUSTERS, "table 1", "adaptive clustering lowers perplexity", "bytes_2000", "clustering",
     "smoe", LOSS, -1, 0.006, 1, SECONDARY},
    {"short.clustering.attacked", CLUSTERS, "table 2", "also attacked", "bytes_2000", "clustering", "smoe", ATTACKED,
     -1, 0.002, 1, SECONDARY},
    {"short.clustering.instability", CLUSTERS, "figure 5", "and instability falls", "bytes_2000", "clustering", "smoe",
     INSTABILITY, -1, 0.4, 1, SECONDARY},
    {"short.aoe", AUTONOMY, "figure 2", "autonomy of experts lowers the loss at equal parameters", "bytes_2000",
     "autonomy", "smoe", LOSS, -1, 0.01, 0, SECONDARY},
    {"short.aoe.load", AUTONOMY, "figure 3", "load is more even at the same balance loss", "bytes_2000", "autonomy",
     "smoe", LOAD_ENTROPY, 1, 0.02, 0, SECONDARY},
    {"short.aoe.confidence", AUTONOMY, "figure 3", "and the choice more confident", "bytes_2000", "autonomy", "smoe",
     ENTROPY, -1, 0.1, 0, SECONDARY},
    {"short.attention", TOKENS, "table 1", "attention-aware routing lowers perplexity, 34.84 to 32.23", "bytes_2000",
     "attention", "smoe", LOSS, -1, 0.015, 1, SECONDARY},
    {"short.locmoe_plus.rows", LOCALITY, "section 4.2", "60 % fewer rows than top-1 at factor 1.1", "bytes_2000",
     "locmoe_plus", "top1", ROWS, -1, 0.6, 1, SECONDARY},
    {"short.locmoe_plus.train", LOCALITY, "figure 3", "and the training loss is kept", "bytes_2000", "locmoe_plus",
     "top1", TRAIN, -1, 0.01, 0, KEEPS},
    {"short.sparsity", OTHER, "Shazeer et al. 2017", "experts beat a dense network of equal active size", "bytes_2000",
     "smoe", "dense", LOSS, -1, 0.02, 0, SECONDARY},
    {"words.similarity", TOKENS, "table 1", "similarity-aware routing lowers perplexity", "words", "similarity", "smoe",
     LOSS, -1, 0.084, 1, SECONDARY},
    {"words.clustering", CLUSTERS, "table 1", "adaptive clustering lowers perplexity", "words", "clustering", "smoe",
     LOSS, -1, 0.03, 1, SECONDARY},
    {"digits.attentive", MODULAR, "slides", "the attentive gate with importance raises I(E;Y)", "digits",
     "attentive_gate", "gate", INFORMATION, 1, 0.1, 0, PRIMARY},
    {"digits.attentive.alone", MODULAR, "slides", "the attentive gate alone does", "digits", "attentive_gate_alone",
     "gate", INFORMATION, 1, 0.1, 0, SECONDARY},
    {"digits.attentive.error", MODULAR, "slides", "and errs no more", "digits", "attentive_gate", "gate", ERROR, -1,
     0.01, 0, KEEPS},
    {"digits.similarity", MODULAR, "slides", "the similarity loss raises I(E;Y)", "digits", "similarity_gate", "gate",
     INFORMATION, 1, 0.1, 0, SECONDARY},
    {"digits.dual", MODULAR, "slides", "dual temperature keeps a fast expert from taking all", "digits", "dual_fast",
     "gate_fast", LOAD_MAX, -1, 0.1, 0, SECONDARY},
    {"digits.fast", MODULAR, "slides", "an expert with ten times the learning rate takes most samples", "digits",
     "gate_fast", "gate", FAST_SHARE, 1, 0.25, 0, SECONDARY},
    {"digits.halves", MODULAR, "slides", "experts for {0-4} and {5-9} err no more than end-to-end training", "digits",
     "halves", "gate", ERROR, -1, 0.01, 0, KEEPS},
    {"digits.pairs", MODULAR, "slides", "experts for pairs of classes err no more than end-to-end training", "digits",
     "pairs", "gate", ERROR, -1, 0.01, 0, KEEPS},
    {"digits.random", MODULAR, "slides", "experts for pairs of classes err no more than those of random shares",
     "digits", "pairs", "random_shares", ERROR, -1, 0.01, 0, KEEPS},
    {"patches.attack", CLUSTERS, "table 4", "adaptive clustering of an image's patches withstands FGSM", "patches",
     "clustering_call", "smoe", ATTACKED, -1, 0.02, 0, SECONDARY},
    {"patches.clean", CLUSTERS, "table 4", "and errs less on clean images", "patches", "clustering_call", "smoe", ERROR,
     -1, 0.01, 0, SECONDARY},
    SCALES(SCALE_CLAIM)
};
enum { N_CLAIMS = sizeof claims / sizeof claims[0] };

#endif
