/* Trains a language model whose experts are distributed over several processes, on one or many
   machines, with Open MPI; measures the communication, and compares LocMoE with its baseline.
     sh examples/run mpi -n 4 [options]
   or: mpicc -std=c99 -O2 -I. examples/mpi.c -o mpi -lm -pthread && mpirun -n 4 ./mpi */

#define _POSIX_C_SOURCE 200112L /* alarm, nanosleep, threads */
#define MOE_IMPLEMENTATION
#include "moe.h"

#include "language.h"
#include "extras/moe_ranks.h"
#include "extras/moe_mpi.h"
#include "study.h"
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

enum {
    MAX_LAYERS = 64, MAX_RANKS = 4096, MAX_SEEDS = 64, PARTS = 20 /* from each of which some text is held out */,
    HELD_SEQUENCES = 128, AT_ONCE = 16
};

/* ---- options ---- */

static struct {
    const char *text, *router, *fields, *plus, *kernels, *load, *save, *checkpoint, *die, *hang, *mismatch, *measure;
    const char *methods, *domains;
    double rate, factor, locality, timeout;
    long words, vocabulary, width, layers, heads, experts, top_k, d_ff, context, batch, steps, warmup, seed;
    long chunks, two_level, local_routing, ranks_per_machine, machines, untimed, checkpoint_every, resume, stop_after,
        compare, seeds, threads_too, check;
} set = {.fields = "",
         .plus = "",
         .kernels = "auto",
         .rate = 0.002,
         .factor = 1.1,
         .timeout = 30,
         .vocabulary = 4096,
         .width = 64,
         .layers = 2,
         .experts = 8,
         .context = 64,
         .batch = 16,
         .steps = 200,
         .warmup = 20,
         .seed = 1,
         .chunks = 1,
         .checkpoint_every = 50,
         .seeds = 5};
static int kernels;

enum { FLAG, WHOLE, REAL, TEXT };
static const struct option {
    const char *name, *value;
    int kind;
    void *at;
    double least, most;
    const char *help;
} options[] = {
    {"--words", "", FLAG, &set.words, 0, 0, "tokens are words between white space instead of bytes"},
    {"--vocabulary", "N", WHOLE, &set.vocabulary, 2, 1e6, "size of the vocabulary: the most frequent words"},
    {"--width", "N", WHOLE, &set.width, 2, 4096, "width of the model: numbers per token"},
    {"--layers", "N", WHOLE, &set.layers, 1, MAX_LAYERS, "number of layers, each attention and experts"},
    {"--heads", "N", WHOLE, &set.heads, 0, 256, "attention heads; 0: one per 32 of the width"},
    {"--experts", "N", WHOLE, &set.experts, 1, 1024, "experts in a layer, distributed over the ranks"},
    {"--top-k", "N", WHOLE, &set.top_k, 0, 1024, "experts per token; 0: as --router says"},
    {"--d-ff", "N", WHOLE, &set.d_ff, 0, 65536, "hidden width of an expert; 0: twice the width"},
    {"--router", "PRESET", TEXT, &set.router, 0, 0,
     "preset of the routers: a name that `sh examples/run routers` lists; else the 2 best"},
    {"--set", "FIELDS", TEXT, &set.fields, 0, 0, "fields of the layers, such as \"capacity_factor=1.1 top_k=2\""},
    {"--context", "N", WHOLE, &set.context, 2, 65536, "tokens of a sequence"},
    {"--batch", "N", WHOLE, &set.batch, 1, 65536, "sequences per step, over all ranks"},
    {"--steps", "N", WHOLE, &set.steps, 0, 1e9, "training steps; 0: none, only the loss on held-out text"},
    {"--rate", "X", REAL, &set.rate, 1e-9, 10, "learning rate, with a cosine schedule"},
    {"--warmup", "N", WHOLE, &set.warmup, 0, 1e6, "warm-up steps of the learning rate"},
    {"--seed", "N", WHOLE, &set.seed, 0, 1e9, "seed of all random choices"},
    {"--chunks", "N", WHOLE, &set.chunks, 1, 1024,
     "parts of a rank's experts: one is exchanged while another is computed"},
    {"--ranks-per-machine", "N", WHOLE, &set.ranks_per_machine, 0, MAX_RANKS, "ranks that share a machine; 0: all"},
    {"--two-level", "", FLAG, &set.two_level, 0, 0, "rows for another machine go through one rank of the sender's"},
    {"--local-routing", "", FLAG, &set.local_routing, 0, 0,
     "every rank routes its own tokens: capacity and selection are its own, and nothing is gathered"},
    {"--locality", "X", REAL, &set.locality, 0, 1e6,
     "factor of the loss that keeps tokens on their machine; 0: as --router says"},
    {"--machines", "N", WHOLE, &set.machines, 0, MAX_RANKS,
     "machines for that loss; 0: from --ranks-per-machine"},
    {"--untimed", "", FLAG, &set.untimed, 0, 0, "no barriers: waiting counts as exchange"},
    {"--load", "FILE", TEXT, &set.load, 0, 0, "starts with a saved model, its shape and its router"},
    {"--save", "FILE", TEXT, &set.save, 0, 0, "the model, as one process would save it"},
    {"--checkpoint", "FILE", TEXT, &set.checkpoint, 0, 0,
     "checkpoint of unfinished training; any number of ranks can resume it"},
    {"--checkpoint-every", "N", WHOLE, &set.checkpoint_every, 1, 1e9, "steps between checkpoints"},
    {"--resume", "", FLAG, &set.resume, 0, 0,
     "resumes from the checkpoint, with any number of ranks; repeat the other options"},
    {"--stop-after", "N", WHOLE, &set.stop_after, 0, 1e9, "stops after N steps and keeps the checkpoint; 0: never"},
    {"--compare", "", FLAG, &set.compare, 0, 0, "instead: compares baselines, LocMoE and LocMoE+ on the same text"},
    {"--seeds", "N", WHOLE, &set.seeds, 1, MAX_SEEDS, "number of seeds with which --compare repeats everything"},
    {"--factor", "X", REAL, &set.factor, 0.01, 1000, "capacity factor of the baseline of --compare"},
    {"--plus", "FIELDS", TEXT, &set.plus, 0, 0, "further fields of LocMoE+ in --compare"},
    {"--threads-too", "", FLAG, &set.threads_too, 0, 0,
     "also one process with as many threads as there are ranks, for comparison"},
    {"--measure", "FILE", TEXT, &set.measure, 0, 0,
     "instead: runs methods of --compare once and appends to FILE the measurements for examples/mpi/scale.c"},
    {"--methods", "NAMES", TEXT, &set.methods, 0, 0,
     "methods of --measure (baseline,locmoe,locmoe_plus); top1 is the baseline with 1 expert"},
    {"--domains", "FILE,FILE,...", TEXT, &set.domains, 0, 0,
     "instead of FILE: the first machine reads the first of these texts, the next one the next, and so on"},
    {"--timeout", "SECONDS", REAL, &set.timeout, 0.1, 1e6, "how long a rank waits for others before it aborts the run"},
    {"--die", "RANK,STEP", TEXT, &set.die, 0, 0, "for tests: this rank is killed in this step"},
    {"--hang", "RANK,STEP", TEXT, &set.hang, 0, 0, "for tests: this rank hangs in this step"},
    {"--mismatch", "RANK,OPTION,VALUE", TEXT, &set.mismatch, 0, 0,
     "for tests: this rank has another value of an option than the others"},
    {"--report", "FILE", TEXT, &report_path, 0, 0,
     "report of the results: a page (FILE.html), a picture (.svg) or text; -: on the screen"},
    {"--kernels", "NAME", TEXT, &set.kernels, 0, 0, "instruction set: auto, c, avx2, ..."},
    {"--check", "", FLAG, &set.check, 0, 0, "tests the transport with this number of ranks"}};
enum { OPTIONS = sizeof options / sizeof *options };

static moe_mpi mpi;
static moe_transport transport;
static moe_traffic traffic;
static int rank, n_ranks;

static char unsaid[600]; /* why this rank failed, unless it is rank 0, which says it at once */

static int fail(const char *what, const char *why) {
    if (rank == 0) fprintf(stderr, "mpi: %s: %s\n", what, why);
    else snprintf(unsaid, sizeof unsaid, "mpi: %s: %s (rank %d)\n", what, why, rank);
    return 1;
}

static int show_help(void) {
    printf("mpi [options] [FILE]   trains on FILE, a tenth of it held out; without FILE: moe.h, moe_routers.h, "
           "moe_kernels.h\n"
           "sh examples/run mpi -n RANKS [options] [FILE]   in RANKS processes; --hosts HOST:SLOTS,...: on these "
           "machines\n");
    for (const struct option *o = options; o < options + OPTIONS; o++) {
        printf("  %-18s %-9s  %s", o->name, o->value, o->help);
        if (o->kind == WHOLE) printf(" (%ld)", *(const long *)o->at);
        if (o->kind == REAL) printf(" (%g)", *(const double *)o->at);
        printf("\n");
    }
    printf("Exit status: 0 done, else failed.\n");
    return fflush(stdout) != 0 || ferror(stdout) ? fail("the output", "cannot be written") : 0;
}

static int set_option(const struct option *o, const char *value) {
    char *end = NULL, text[200];
    double number = o->kind == TEXT ? 0 : strtod(value, &end);
    if (o->kind == TEXT) {
        *(const char **)o->at = value;
        return 0;
    }
    if (end == value || *end != '\0' || !(number >= o->least && number <= o->most) ||
        (o->kind == WHOLE && floor(number) < number)) {
        snprintf(text, sizeof text, "not a value from %g to %g; see -h", o->least, o->most);
        return fail(o->name, text);
    }
    if (o->kind == WHOLE) *(long *)o->at = (long)number;
    else *(double *)o->at = number;
    return 0;
}

static const struct option *find_option(const char *name, size_t length) {
    const struct option *o = options;
    while (o < options + OPTIONS && (strlen(o->name) != length || strncmp(name, o->name, length) != 0)) o++;
    return o < options + OPTIONS ? o : NULL;
}

/* --mismatch: an option has a different value on one rank. */
static int differ(const char *text) {
    const char *name = text != NULL ? strchr(text, ',') : NULL, *value = name != NULL ? strchr(name + 1, ',') : NULL;
    const struct option *o = value != NULL ? find_option(name + 1, (size_t)(value - name - 1)) : NULL;
    if (text == NULL) return 0;
    if (o == NULL || o->kind == FLAG) return fail("--mismatch", "needs RANK,OPTION,VALUE, such as 1,--seed,2");
    return strtol(text, NULL, 10) == rank && set_option(o, value + 1);
}

static int read_options(int count, char **words) {
    while (--count > 0) {
        const char *word = *++words;
        const struct option *o = find_option(word, strlen(word));
        if (*word != '-' && set.text == NULL) set.text = word;
        else if (o == NULL) return fail(word, "no such option, or a second text; see -h");
        else if (o->kind == FLAG) *(long *)o->at = 1;
        else if (--count == 0) return fail(word, "its value is missing; see -h");
        else if (set_option(o, *++words)) return 1;
    }
    for (kernels = 0; moe_kernels_name(kernels) != NULL && strcmp(moe_kernels_name(kernels), set.kernels) != 0;)
        kernels++;
    if (moe_kernels_name(kernels) == NULL) return fail(set.kernels, "no such kernels");
    if (set.resume && set.checkpoint == NULL) return fail("--resume", "needs --checkpoint FILE to resume from");
    if (set.router != NULL && moe_preset_find(set.router) == NULL)
        return fail(set.router, "there is no preset of this name; sh examples/run routers lists them");
    return differ(set.mismatch);
}

/* ---- failures ---- */

static uint64_t saved_step; /* step of the last checkpoint; 0: none */

/* Ends all ranks. If all fail in the same way, rank 0 reports it; a rank whose peer failed leaves
   the report to that one. */
static void end_all(moe_status status, const char *what, const moe_error *error) {
    const char *why = mpi.error[0] != '\0'                         ? mpi.error
                      : error != NULL && error->message[0] != '\0' ? error->message
                                                                   : moe_status_text(status);
    if (status != MOE_ERR_TRANSPORT && (rank > 0 || status == MOE_ERR_PEER)) {
        struct timespec second = {.tv_sec = 1};
        nanosleep(&second, NULL);
    }
    fprintf(stderr, "mpi: %s: %s (rank %d of %d aborts the run)\n", what, why, rank, n_ranks);
    if (saved_step > 0)
        fprintf(stderr, "mpi: %s holds step %.0f: the same command with --resume continues\n", set.checkpoint,
                (double)saved_step);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static void must(moe_status status, const char *what, const moe_error *error) {
    if (status != MOE_OK) end_all(status, what, error);
}

/* A timeout for calls of MPI that do not return: start, end, or a send. */
static void stuck(int signal_number) {
    static const char text[] = "mpi: a rank ends: MPI has not returned for more than twice the timeout\n";
    (void)signal_number;
    (void)!write(2, text, sizeof text - 1);
    _exit(1);
}

/* Restarts the watchdog: the next call is due within the limit. 0: no limit. */
static void watch(int on) {
    double most = 2 * set.timeout + 20;
    if (n_ranks > 1 || !on) (void)alarm(on && most < 1e6 ? (unsigned)most : 0);
}

static void *grab(size_t count, size_t size) {
    void *block = calloc(count > 0 ? count : 1, size);
    if (block == NULL) end_all(MOE_ERR_MEMORY, "memory", NULL);
    return block;
}

/* Whether RANK,STEP, of --die or --hang, is this rank in this step. */
static int meant(const char *text, uint64_t step) {
    char *end;
    long who = text != NULL ? strtol(text, &end, 10) : -1;
    return text != NULL && who == rank && *end == ',' && strtol(end + 1, NULL, 10) == (long)step;
}

static void obey_tests(uint64_t step) {
    if (meant(set.die, step)) raise(SIGKILL);
    if (meant(set.hang, step)) raise(SIGSTOP);
}

/* ---- text ---- */

static language vocabulary;
static language_text train_text, held_text; /* of all domains, one after the other */
static moe_buffer train_bytes, held_bytes;
enum { MAX_DOMAINS = 16 };
static struct domain {
    language_text train, held; /* parts of those above */
} domains[MAX_DOMAINS];
static int n_domains = 1;

/* Reads the texts of --domains, or one; bytes [MAX_DOMAINS][2] receives where each domain ends in
   the training and in the held-out text. */
static void read_domains(size_t bytes[MAX_DOMAINS][2]) {
    char name[1024];
    const char *at = set.domains;
    const char *one = name, *const *names = set.text != NULL ? &set.text : example_headers();
    size_t n = set.text != NULL ? 1 : 3;
    moe_error error = {0};
    n_domains = 0;
    do {
        moe_buffer text = {0};
        size_t length = at != NULL ? strcspn(at, ",") : 0;
        if (n_domains == MAX_DOMAINS || length >= sizeof name)
            language_error(&error, MOE_ERR_ARGUMENT, "--domains: more than %d texts, or too long a name", MAX_DOMAINS);
        must(error.code, "the texts", &error);
        if (at != NULL) {
            memcpy(name, at, length);
            name[length] = '\0';
            at = at[length] == ',' ? at + length + 1 : NULL;
            names = &one;
            n = 1;
        }
        must(language_read(names, n, &text, &error), "the text", &error);
        must(language_split(&text, PARTS, 0.1, &train_bytes, &held_bytes, &error), "the text", &error);
        moe_buffer_free(&text);
        bytes[n_domains][0] = train_bytes.size;
        bytes[n_domains++][1] = held_bytes.size;
    } while (at != NULL);
}

/* Appends the ids of bytes [from, to) to out; *part points to them. */
static void encode_part(const moe_buffer *bytes, size_t from, size_t to, language_text *out, language_text *part) {
    moe_buffer piece = *bytes;
    moe_error error = {0};
    if (from > 0) piece.data += from; /* else it may be NULL */
    piece.size = to - from;
    must(language_encode(&vocabulary, &piece, part, &error), "the text", &error);
    memcpy(out->ids + out->n, part->ids, part->n * sizeof *part->ids);
    free(part->ids);
    part->ids = out->ids + out->n;
    out->n += part->n;
}

static void prepare(void) {
    size_t bytes[MAX_DOMAINS][2], from[2] = {0, 0};
    moe_error error = {0};
    read_domains(bytes);
    must(language_learn(&vocabulary, &train_bytes, (int)set.words, (int)set.vocabulary, &error), "the text", &error);
    train_text.ids = (int32_t *)grab(train_bytes.size + 1, sizeof *train_text.ids);
    held_text.ids = (int32_t *)grab(held_bytes.size + 1, sizeof *held_text.ids);
    for (int d = 0; d < n_domains; d++) {
        encode_part(&train_bytes, from[0], bytes[d][0], &train_text, &domains[d].train);
        encode_part(&held_bytes, from[1], bytes[d][1], &held_text, &domains[d].held);
        memcpy(from, bytes[d], sizeof from);
        if (domains[d].train.n > (size_t)set.context && domains[d].held.n > (size_t)set.context) continue;
        language_error(&error, MOE_ERR_ARGUMENT, "%s is too short: a tenth of its tokens must be more than --context",
                       n_domains == 1 && set.text != NULL ? set.text : "the text");
        end_all(error.code, "the text", &error);
    }
}

/* A rank's part of the sequences, and the machines of tokens and experts for the routers. */
typedef struct share {
    size_t first, n; /* sequences */
    int32_t *ids, *labels, *home, *expert_machine;
    moe_call call;
    moe_data data;
} share;

static int machines(void) {
    return set.machines > 0 ? (int)set.machines : set.ranks_per_machine > 0 ? n_ranks / (int)set.ranks_per_machine : 1;
}

/* The part of n that contains item i. */
static int part_of(size_t i, size_t n, int parts) {
    size_t first, count;
    int p = 0;
    for (; p < parts - 1; p++) {
        moe_rank_part(n, p, parts, &first, &count);
        if (i < first + count) break;
    }
    return p;
}

/* The machine of item i of n: that of its rank, or, if machines are only simulated, the part that i
   is in. */
static int32_t machine_of(size_t i, size_t n, int ranks) {
    int m = machines();
    return (int32_t)(ranks % m == 0 ? part_of(i, n, ranks) / (ranks / m) : part_of(i, n, m));
}

/* The text that sequence i of n comes from. */
static const struct domain *domain_of(size_t i, size_t n) {
    return &domains[n_domains > 1 ? machine_of(i, n, n_ranks) % n_domains : 0];
}

/* This rank's part of n sequences; a single process has all of them. */
static share share_of(size_t sequences, int one_process) {
    size_t length = (size_t)set.context, i;
    int ranks = one_process ? 1 : n_ranks;
    share s;
    memset(&s, 0, sizeof s);
    moe_rank_part(sequences, one_process ? 0 : rank, ranks, &s.first, &s.n);
    s.ids = (int32_t *)grab(sequences * length, sizeof *s.ids);
    s.labels = (int32_t *)grab(sequences * length, sizeof *s.labels);
    s.home = (int32_t *)grab(s.n * length, sizeof *s.home);
    s.expert_machine = (int32_t *)grab((size_t)set.experts, sizeof *s.expert_machine);
    for (i = 0; i < s.n * length; i++) s.home[i] = machine_of(s.first + i / length, sequences, ranks);
    for (i = 0; i < (size_t)set.experts; i++) s.expert_machine[i] = machine_of(i, (size_t)set.experts, ranks);
    return s;
}

/* Sets data and call, which point into the share; do not move it afterwards. */
static void share_point(share *s) {
    size_t length = (size_t)set.context;
    if (machines() > 1) {
        s->call.token_machine = s->home;
        s->call.expert_machine = s->expert_machine;
    }
    s->data.n = s->n * length;
    s->data.length = length;
    s->data.call = &s->call;
    s->data.token_ids = s->ids + s->first * length;
    s->data.labels = s->labels + s->first * length;
}

static void share_free(share *s) {
    free(s->ids);
    free(s->labels);
    free(s->home);
    free(s->expert_machine);
}

/* The sequences of a step depend on the seed and the step only, so that every rank draws all of
   them and training can continue with any number of ranks. */
static void draw(share *s, uint64_t seed, uint64_t step) {
    size_t n = (size_t)set.batch, length = (size_t)set.context;
    moe_rng rng;
    moe_rng_seed(&rng, seed * 1000003 + step);
    for (size_t i = 0; i < n; i++)
        language_draw(&domain_of(i, n)->train, 1, length, &rng, s->ids + i * length, s->labels + i * length);
}

/* ---- the network ---- */

/* One row of --compare, or the router of the options. */
typedef struct method {
    const char *name, *preset, *fields;
} method;

static void configure(const method *m, moe_layer_config *c) {
    moe_error error = {0};
    moe_router_config *r = &c->router;
    memset(c, 0, sizeof *c);
    r->loss_balance = (moe_real)0.01;
    if (m->preset != NULL) must(moe_layer_preset(m->preset, c, &error), "--router", &error);
    r->n_experts = (int)set.experts;
    if (set.top_k > 0) r->top_k = (int)set.top_k;
    if (r->top_k > r->n_experts) r->top_k = r->n_experts;
    if (r->select == MOE_SELECT_HASH || r->student_dim > 0) r->table_size = vocabulary.size;
    if (set.locality > 0) r->loss_locality = (moe_real)set.locality;
    must(moe_fields_apply(moe_layer_fields(), c, m->fields, &error), "fields of the layers", &error);
    must(moe_fields_apply(moe_layer_fields(), c, set.fields, &error), "--set", &error);
    if (machines() < 2) r->loss_locality = 0;
    r->nodes = r->loss_locality > 0 ? machines() : 0;
    if (c->d_ff == 0) c->d_ff = (int)(set.d_ff > 0 ? set.d_ff : 2 * set.width);
}

/* with: the transport, or NULL for a single process. */
static void build(moe_net *net, const moe_layer_config *experts, uint64_t seed, const moe_transport *with) {
    moe_attention_config attention = {.heads = (int)set.heads, .rotary = 1};
    moe_error error = {0};
    moe_net_init(net, 0, kernels, NULL);
    net->transport = with;
    moe_net_embedding(net, vocabulary.size, (int)set.width);
    for (long l = 0; l < set.layers; l++) {
        moe_net_rms_norm(net);
        moe_net_attention(net, &attention);
        moe_net_residual(net, 2);
        moe_net_rms_norm(net);
        moe_net_mixture(net, experts);
        moe_net_residual(net, 2);
    }
    moe_net_rms_norm(net);
    moe_net_tied(net);
    must(moe_net_build(net, 1, seed, &error), "this network", &error);
}

static void train_with(moe_trainer *trainer, moe_net *net, uint64_t seed, size_t sequences) {
    moe_train_config t;
    moe_error error = {0};
    memset(&t, 0, sizeof t);
    t.batch = (int)(sequences > 0 ? sequences * (size_t)set.context : (size_t)set.context);
    t.rate = (moe_real)set.rate;
    t.final_rate = (moe_real)0.1;
    t.warmup = (int)set.warmup;
    t.total_steps = (int)set.steps;
    t.decay = (moe_real)0.1;
    t.clip = 1;
    t.seed = seed;
    must(moe_trainer_init(trainer, net, &t, &error), "the trainer", &error);
}

/* The largest number of sequences of a rank. */
static size_t most_sequences(void) {
    size_t first, n;
    moe_rank_part((size_t)set.batch, 0, n_ranks, &first, &n);
    return n;
}

/* ---- comparing settings ---- */

static uint64_t mix(uint64_t hash, const void *bytes, size_t n) { /* FNV-1a */
    const unsigned char *p = (const unsigned char *)bytes;
    for (size_t i = 0; i < n; i++) hash = (hash ^ p[i]) * 1099511628211u;
    return hash;
}

/* Before the first step: compares the settings of all ranks and names a difference. */
static void agree(const moe_layer_config *experts, const moe_trainer *trainer) {
    static const char *const names[] = {"text",
                                        "--words or --vocabulary",
                                        "--width",
                                        "--layers",
                                        "--heads",
                                        "--context",
                                        "--batch",
                                        "--steps or --stop-after",
                                        "--rate or --warmup",
                                        "--seed",
                                        "--machines",
                                        "step in its checkpoint",
                                        "--checkpoint-every",
                                        "size of numbers",
                                        "router or experts in its layers"};
    enum { N = sizeof names / sizeof *names };
    uint64_t values[N], hash = 14695981039346656037u;
    char text[100];
    moe_error error = {0};
    int who = 0;
    size_t what = 0;
    values[0] = mix(mix(hash, train_bytes.data, train_bytes.size), held_bytes.data, held_bytes.size);
    values[1] = (uint64_t)vocabulary.size;
    values[2] = (uint64_t)set.width;
    values[3] = (uint64_t)set.layers;
    values[4] = (uint64_t)set.heads;
    values[5] = (uint64_t)set.context;
    values[6] = (uint64_t)set.batch;
    values[7] = (uint64_t)set.steps * 1000003u + (uint64_t)set.stop_after;
    values[8] = mix(mix(hash, &set.rate, sizeof set.rate), &set.warmup, sizeof set.warmup);
    values[9] = (uint64_t)set.seed;
    values[10] = (uint64_t)machines();
    values[11] = trainer->steps;
    values[12] = (uint64_t)set.checkpoint_every;
    values[13] = sizeof(moe_real);
    for (const moe_field *f = moe_layer_fields(); f->name != NULL; f++) {
        moe_field_text(f, experts, text, sizeof text);
        /* another machine may have different ones */
        if (strcmp(f->name, "kernels") != 0) hash = mix(hash, text, strlen(text) + 1);
    }
    values[14] = hash;
    moe_status status = moe_transport_agree(&transport, N, values, &who, &what);
    if (status == MOE_ERR_CONFIG)
        language_error(&error, status, "rank %d has another %s than rank %d", who, what < N ? names[what] : "setting",
                       rank);
    must(status, "before the first step", &error);
}

/* ---- sums over ranks ---- */

/* Gathers every rank's n numbers: all [n_ranks,n]. Not counted in times and bytes of the
   training. */
static void gather(size_t n, const double *own, double *all) {
    uint64_t *send = (uint64_t *)grab(n * (size_t)n_ranks, sizeof *send);
    uint64_t *receive = (uint64_t *)grab(n * (size_t)n_ranks, sizeof *receive);
    double waiting = mpi.waiting, exchanging = mpi.exchanging;
    for (size_t r = 0; r < (size_t)n_ranks; r++) memcpy(send + r * n, own, n * sizeof *own);
    must(transport.counts(transport.ctx, n, send, receive), "gathering", NULL);
    memcpy(all, receive, n * (size_t)n_ranks * sizeof *all);
    mpi.waiting = waiting;
    mpi.exchanging = exchanging;
    free(send);
    free(receive);
}

/* own [n] = the sum over ranks. */
static void add_up(size_t n, double *own) {
    double *all = (double *)grab(n * (size_t)n_ranks, sizeof *all);
    gather(n, own, all);
    for (size_t i = 0; i < n; i++) {
        own[i] = 0;
        for (size_t r = 0; r < (size_t)n_ranks; r++) own[i] += all[r * n + i];
    }
    free(all);
}

/* ---- training ---- */

/* Results of training. Communication is per step, summed over ranks. */
typedef struct result {
    /* nats per token: mean of the last tenth of the steps; on held-out text after training */
    double loss, held;
    double seconds, computing, exchanging, waiting; /* per step, mean over ranks */
    /* token rows to other ranks, machines; share of the assignments */
    double rows, rows_off_machine, remote, off_machine;
    double bytes, bytes_sums;                     /* to other ranks: rows, routers and counts; sums of gradients */
    double calls;                                 /* exchanges of counts, of rows, and sums */
    /* tokens per step that an expert of a layer computes; the busiest one, on held-out text, in the
       same unit */
    double per_expert, most_per_expert;
    /* assignments per token in each half of training, which shows a shrinking capacity */
    double first_half, second_half;
    uint64_t steps;
} result;

static moe_history history;
static double *step_times; /* [steps] for --measure and --threads-too, else NULL */
static double *link_rows, *link_bytes, *link_sums; /* [n_ranks,n_ranks] per step, of the last training */

static void clear_counts(void) {
    uint64_t *rows = traffic.rows, *bytes = traffic.bytes;
    memset(&traffic, 0, sizeof traffic);
    traffic.rows = rows;
    traffic.bytes = bytes;
    memset(rows, 0, (size_t)n_ranks * sizeof *rows);
    memset(bytes, 0, (size_t)n_ranks * sizeof *bytes);
    memset(mpi.sum_bytes, 0, (size_t)n_ranks * sizeof *mpi.sum_bytes);
    mpi.waiting = mpi.exchanging = 0;
    mpi.calls = 0;
}

static void tell(const moe_trainer *t, double loss, double took, uint64_t steps) {
    if (rank != 0) return;
    printf("step %5.0f of %ld: loss %.3f, %6.0f tokens/s; rank 0 computes %4.1f %%, exchanges %4.1f %%, waits %4.1f %% "
           "of the time\n",
           (double)t->steps, set.steps, loss, (double)(set.batch * set.context) * (double)steps / took,
           100 * (1 - (mpi.exchanging + mpi.waiting) / took), 100 * mpi.exchanging / took, 100 * mpi.waiting / took);
    fflush(stdout);
}

static void save_checkpoint(const moe_trainer *t) {
    moe_error error = {0};
    if (set.checkpoint == NULL) return;
    must(moe_trainer_save(t, set.checkpoint, &error), set.checkpoint, &error);
    saved_step = t->steps;
}

/* Traffic of the links, per step. */
static void take_links(double steps) {
    size_t n = (size_t)n_ranks, i;
    double *own = (double *)grab(3 * n, sizeof *own), *all = (double *)grab(3 * n * n, sizeof *all);
    for (i = 0; i < n; i++) {
        own[i] = (double)traffic.rows[i] / steps;
        own[n + i] = (double)traffic.bytes[i] / steps;
        own[2 * n + i] = (double)mpi.sum_bytes[i] / steps;
    }
    gather(3 * n, own, all);
    for (i = 0; i < n * n; i++) {
        const double *from = all + i / n * 3 * n + i % n;
        link_rows[i] = from[0];
        link_bytes[i] = from[n];
        link_sums[i] = from[2 * n];
    }
    free(own);
    free(all);
}

/* Fills in the counts of the steps, which took `took` seconds. */
static void take_counts(result *r, double took, const double assigned[2]) {
    size_t n = (size_t)n_ranks, i, per_machine = n / (size_t)(n_ranks % machines() == 0 ? machines() : 1);
    const double steps = (double)r->steps, half = floor(steps / 2);
    const double tokens = (double)(set.batch * set.context) * (double)set.layers; /* of all layers, in a step */
    double own[] = {took,
                    mpi.exchanging,
                    mpi.waiting,
                    (double)traffic.assignments,
                    (double)traffic.assignments_remote,
                    (double)traffic.assignments_off_machine,
                    assigned[0],
                    assigned[1]};
    r->calls = (double)mpi.calls / steps;
    take_links(steps);
    add_up(sizeof own / sizeof *own, own);
    r->seconds = own[0] / steps / (double)n;
    r->exchanging = own[1] / steps / (double)n;
    r->waiting = own[2] / steps / (double)n;
    r->computing = r->seconds - r->exchanging - r->waiting;
    r->remote = own[3] > 0 ? own[4] / own[3] : 0;
    r->off_machine = own[3] > 0 ? own[5] / own[3] : 0;
    r->per_expert = own[3] / steps / (double)set.layers / (double)set.experts;
    r->first_half = half > 0 ? own[6] / (tokens * half) : 0;
    r->second_half = own[7] / (tokens * (steps - half));
    for (i = 0; i < n * n; i++) {
        if (i / n == i % n) continue;
        r->rows += link_rows[i];
        r->bytes += link_bytes[i];
        r->bytes_sums += link_sums[i];
        if (i / n / per_machine != i % n / per_machine) r->rows_off_machine += link_rows[i];
    }
}

/* Trains until the last step, or that of --stop-after. */
static void train(moe_trainer *t, uint64_t seed, int shown, result *r) {
    share s = share_of((size_t)set.batch, 0);
    moe_error error = {0};
    moe_step step;
    uint64_t last = set.stop_after > 0 && set.stop_after < set.steps ? (uint64_t)set.stop_after : (uint64_t)set.steps;
    uint64_t first = t->steps;
    double began, sum = 0, losses[2], ended = 0;
    double assigned[2] = {0, 0};
    memset(r, 0, sizeof *r);
    share_point(&s);
    clear_counts();
    began = MPI_Wtime();
    while (t->steps < last) {
        double before = (double)traffic.assignments, from = MPI_Wtime();
        obey_tests(t->steps + 1);
        watch(1);
        draw(&s, seed, t->steps);
        must(moe_trainer_step(t, &s.data, &step, &error), "training", &error);
        ended = MPI_Wtime();
        sum += (double)step.loss;
        if (step_times != NULL) step_times[t->steps - 1 - first] = ended - from;
        assigned[t->steps - first > (last - first) / 2] += (double)traffic.assignments - before;
        if (t->steps > last - (last + 9) / 10) {
            r->loss += (double)step.loss;
            r->steps++;
        }
        losses[0] = (double)step.loss;
        losses[1] = (double)step.router_loss;
        if (shown && report_path != NULL) (void)moe_history_add(&history, (double)t->steps, losses, 2);
        if (shown && (t->steps % ((last + 9) / 10) == 0 || t->steps == last))
            tell(t, sum / (double)(t->steps - first), ended - began, t->steps - first);
        if (shown && (t->steps % (uint64_t)set.checkpoint_every == 0 || t->steps == last)) save_checkpoint(t);
    }
    r->loss /= r->steps > 0 ? (double)r->steps : 1;
    r->steps = last > first ? last - first : 1;
    take_counts(r, ended > began ? ended - began : 0, assigned);
    share_free(&s);
}

/* ---- held-out text ---- */

static share held_share(size_t *sequences) {
    size_t length = (size_t)set.context, n = HELD_SEQUENCES, first, count;
    size_t parts = (size_t)(n_domains < machines() ? n_domains : machines());
    for (int d = 0; d < n_domains; d++) {
        size_t there = (domains[d].held.n - 1) / length * parts;
        if (there < n) n = there;
    }
    if (parts > 1) n -= n % (size_t)n_ranks; /* the same number for each machine */
    share s = share_of(n, 0);
    for (first = 0; first < n; first += count) { /* a run of sequences from the same text */
        const struct domain *d = domain_of(first, n);
        for (count = 1; first + count < n && domain_of(first + count, n) == d;) count++;
        (void)language_spread(&d->held, count, length, s.ids + first * length, s.labels + first * length);
    }
    *sequences = n;
    return s;
}

/* Tokens of held-out text at each expert of each layer, summed over ranks: loads [layers,experts]
   and the number of tokens. */
static double take_loads(const moe_net *net, const share *held, double *loads) {
    moe_call call = held->call;
    moe_net_pass pass;
    size_t length = (size_t)set.context, n = held->n < AT_ONCE ? held->n : AT_ONCE, bytes, s;
    size_t l = 0, experts = (size_t)set.experts;
    int32_t places[AT_ONCE + 1];
    double *own = (double *)grab((size_t)set.layers * experts + 1, sizeof *own), tokens;
    must(moe_net_work_size(net, AT_ONCE * length, 0, &bytes), "counting tokens", NULL);
    void *work = grab(bytes, 1);
    for (s = 0; s <= n; s++) places[s] = (int32_t)(s * length);
    call.n_tokens = n * length;
    call.token_ids = held->data.token_ids;
    call.sequences = places;
    call.n_sequences = n;
    must(moe_net_forward(net, &call, work, bytes, &pass), "counting tokens", NULL);
    for (size_t i = 0; i < net->n_modules && l < (size_t)set.layers; i++) {
        const moe_routing *r = moe_net_routing(net, &pass, i);
        if (r == NULL) continue; /* not an MoE layer */
        for (size_t e = 0; e < experts; e++)
            own[l * experts + e] = (double)(r->plan.offsets[e + 1] - r->plan.offsets[e]);
        l++;
    }
    own[(size_t)set.layers * experts] = (double)call.n_tokens;
    add_up((size_t)set.layers * experts + 1, own);
    tokens = own[(size_t)set.layers * experts];
    memcpy(loads, own, (size_t)set.layers * experts * sizeof *loads);
    free(work);
    free(own);
    return tokens;
}

static void judge(const moe_net *net, result *r, double *loads) {
    size_t sequences;
    share held = held_share(&sequences);
    moe_data all; /* moe_evaluate distributes it over the ranks */
    moe_evaluation e;
    moe_error error = {0};
    double most = 0, tokens;
    share_point(&held);
    all = held.data;
    all.call = NULL;
    all.token_ids = held.ids;
    all.labels = held.labels;
    all.n = sequences * all.length;
    must(moe_evaluate(net, &all, MOE_CRITERION_CROSS_ENTROPY, &e, &error), "held-out text", &error);
    r->held = (double)e.loss;
    tokens = take_loads(net, &held, loads);
    for (long i = 0; i < set.layers * set.experts; i++) most = loads[i] > most ? loads[i] : most;
    r->most_per_expert = tokens > 0 ? most / tokens * (double)(set.batch * set.context) : 0;
    share_free(&held);
}

/* Prints a note on times if ranks share processors. */
static void say_crowded(void) {
    MPI_Comm here;
    int ranks = 1;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    if (MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here) == MPI_SUCCESS) {
        MPI_Comm_size(here, &ranks);
        MPI_Comm_free(&here);
    }
    if (rank == 0 && processors > 0 && ranks > processors)
        printf("%d ranks share %ld processors here: their times include waiting for a processor, and say little about "
               "separate machines\n",
               ranks, processors);
}

/* ---- results ---- */

static void show_links(void) {
    table_new(1);
    table_row();
    table_put("from rank");
    for (int to = 0; to < n_ranks && to < COLUMNS - 1; to++) table_put("to %d", to);
    for (int from = 0; from < n_ranks && from < COLUMNS - 1; from++) {
        table_row();
        table_put("%d", from);
        for (int to = 0; to < n_ranks && to < COLUMNS - 1; to++) {
            size_t i = (size_t)from * (size_t)n_ranks + (size_t)to;
            if (from == to) table_put("%.0f rows stay", link_rows[i]);
            else table_put("%.0f rows, %.1f + %.1f kB", link_rows[i], link_bytes[i] / 1e3, link_sums[i] / 1e3);
        }
    }
    printf("\nPer step, from rank to rank: rows of tokens, kB of rows, routers and counts + kB of sums of gradients\n");
    table_print();
    table_report("What each link carries in a step",
                 "Rows of tokens; kB of rows, of what routers gather and of counts, + kB of sums of gradients.");
}

static void show_result(const result *r) {
    printf("\nA step takes %.2f ms: %.2f ms of computation, %.2f ms of exchange, %.2f ms of waiting for other ranks "
           "(means over ranks)%s\n",
           1e3 * r->seconds, 1e3 * r->computing, 1e3 * r->exchanging, 1e3 * r->waiting,
           set.untimed ? "; waiting counts as exchange" : "");
    printf("and moves %.0f rows of tokens between ranks (%.0f between machines), %.1f kB, and %.1f kB for sums of "
           "gradients, in %.1f exchanges\n",
           r->rows, r->rows_off_machine, r->bytes / 1e3, r->bytes_sums / 1e3, r->calls);
    printf("%.1f %% of the token-expert assignments leave their rank, %.1f %% their machine. An expert computes %.1f "
           "tokens per step and layer, the busiest %.0f\n",
           100 * r->remote, 100 * r->off_machine, r->per_expert, r->most_per_expert);
    printf("A token goes to %.2f experts in the first half of the steps, %.2f in the second\n", r->first_half,
           r->second_half);
    if (n_ranks > 1) show_links();
}

static void report_training(const result *r) {
    static const char *const losses[] = {"training", "router"};
    static const char *const times[] = {"ms"};
    static const char *const kinds[] = {"computation", "exchange", "waiting"};
    double ms[] = {1e3 * r->computing, 1e3 * r->exchanging, 1e3 * r->waiting};
    moe_figure *f = report_take(moe_figure_history(&history, 0, 2, losses), "Training losses");
    f->value_label = "loss (nats)";
    f = report_add(MOE_FIGURE_BARS, "Time of a step", 3, 1);
    f->values = report_numbers(ms, 3);
    f->row_names = kinds;
    f->column_names = times;
    f->row_label = "what";
    f->value_label = "ms, mean over ranks";
    if (n_ranks == 1) return;
    f = report_add(MOE_FIGURE_HEAT, "Rows of tokens per step, from rank to rank", (size_t)n_ranks, (size_t)n_ranks);
    f->values = report_numbers(link_rows, (size_t)n_ranks * (size_t)n_ranks);
    f->row_label = "from rank";
    f->column_label = "to rank";
    f->value_label = "rows";
    f->caption = "Rows on the diagonal stay on their rank.";
}

static void report_run(const result *r, const double *loads) {
    moe_figure *f;
    if (report_path == NULL) return;
    if (r->steps > 0) report_training(r);
    f = report_add(MOE_FIGURE_HEAT, "Tokens of held-out text by layer and expert", (size_t)set.layers,
                   (size_t)set.experts);
    f->values = report_numbers(loads, (size_t)(set.layers * set.experts));
    f->row_label = "layer";
    f->column_label = "expert";
    f->value_label = "tokens";
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, size_t n) {
    qsort(x, n, sizeof *x, compare_doubles);
    return x[n / 2];
}

/* ---- one process with threads ---- */

/* Threads that wait for tasks. */
typedef struct team {
    pthread_t thread[64];
    pthread_mutex_t lock;
    pthread_cond_t come, done;
    void (*task)(void *work, int index);
    void *work;
    int threads, next, count, busy, end;
} team;

/* Runs tasks until there are none; called with the lock held. */
static void team_work(team *t) {
    while (t->next < t->count) {
        int i = t->next++;
        t->busy++;
        pthread_mutex_unlock(&t->lock);
        t->task(t->work, i);
        pthread_mutex_lock(&t->lock);
        t->busy--;
    }
    if (t->busy == 0) pthread_cond_signal(&t->done);
}

static void *team_member(void *ctx) {
    team *t = (team *)ctx;
    pthread_mutex_lock(&t->lock);
    while (!t->end) {
        if (t->next < t->count) team_work(t);
        else pthread_cond_wait(&t->come, &t->lock);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

static void team_run(void *ctx, void (*task)(void *work, int index), void *work, int count) {
    team *t = (team *)ctx;
    pthread_mutex_lock(&t->lock);
    t->task = task;
    t->work = work;
    t->next = 0;
    t->count = count;
    pthread_cond_broadcast(&t->come);
    team_work(t);
    while (t->busy > 0) pthread_cond_wait(&t->done, &t->lock);
    t->count = 0;
    pthread_mutex_unlock(&t->lock);
}

static int team_begin(team *t, int threads) {
    memset(t, 0, sizeof *t);
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->come, NULL);
    pthread_cond_init(&t->done, NULL);
    for (t->threads = 1; t->threads < threads && t->threads < 64; t->threads++)
        if (pthread_create(&t->thread[t->threads], NULL, team_member, t) != 0) break;
    return t->threads;
}

static void team_end(team *t) {
    pthread_mutex_lock(&t->lock);
    t->end = 1;
    pthread_cond_broadcast(&t->come);
    pthread_mutex_unlock(&t->lock);
    for (int i = 1; i < t->threads; i++) pthread_join(t->thread[i], NULL);
    pthread_cond_destroy(&t->done);
    pthread_cond_destroy(&t->come);
    pthread_mutex_destroy(&t->lock);
}

/* Median seconds per step of one process with that many threads. */
static double alone(const moe_layer_config *experts, uint64_t seed, int threads, uint64_t steps) {
    team crew;
    moe_parallel parallel = {.ctx = &crew, .threads = team_begin(&crew, threads), .run = team_run};
    moe_net net;
    moe_trainer trainer;
    moe_error error = {0};
    double began, half, *took = (double *)grab(steps, sizeof *took);
    share s = share_of((size_t)set.batch, 1);
    share_point(&s);
    s.call.parallel = &parallel;
    build(&net, experts, seed, NULL);
    train_with(&trainer, &net, seed, (size_t)set.batch);
    while (trainer.steps < steps) {
        began = MPI_Wtime();
        draw(&s, seed, trainer.steps);
        must(moe_trainer_step(&trainer, &s.data, NULL, &error), "one process with threads", &error);
        took[trainer.steps - 1] = MPI_Wtime() - began;
    }
    half = median(took, steps);
    moe_trainer_free(&trainer);
    moe_net_free(&net);
    share_free(&s);
    team_end(&crew);
    free(took);
    return half;
}

/* Rank 0 works alone; the others wait in the next exchange. */
static void compare_threads(const moe_layer_config *experts, uint64_t done) {
    uint64_t steps = done < 50 ? done : 50;
    double times[3] = {0, 0, 0}, timeout = mpi.timeout;
    times[0] = median(step_times, done) / n_ranks;
    add_up(1, times);
    mpi.timeout = 0;
    watch(0);
    if (rank == 0) {
        times[1] = alone(experts, (uint64_t)set.seed, n_ranks, steps);
        times[2] = alone(experts, (uint64_t)set.seed, 1, steps);
    } else times[0] = 0;
    add_up(3, times);
    mpi.timeout = timeout;
    watch(1);
    if (rank != 0) return;
    printf("\nOne process on this machine takes %.2f ms per step with %d threads for its experts, %.2f ms with one; %d "
           "ranks take %.2f ms: %.2f times as long as\n"
           "as many threads, %.2f times as long as one (medians).\n",
           1e3 * times[1], n_ranks, 1e3 * times[2], n_ranks, 1e3 * times[0], times[0] / times[1], times[0] / times[2]);
}

/* ---- --compare ---- */

/* The last two have a shared expert, which every token uses on its own rank; CONTROL drops tokens
   by position instead of by affinity. */
enum { BASELINE, SWITCH, LOCMOE, PLUS, SHARED, CONTROL, METHODS };
static char method_fields[METHODS][400];
static method methods[METHODS] = {{"baseline, 2 experts", "mixtral", method_fields[BASELINE]},
                                  {"baseline, 1 expert", NULL, method_fields[SWITCH]},
                                  {"LocMoE", "locmoe", ""},
                                  {"LocMoE+", "locmoe_plus", method_fields[PLUS]},
                                  {"LocMoE+, shared expert", "locmoe_plus", method_fields[SHARED]},
                                  {"1 and a shared expert", NULL, method_fields[CONTROL]}};

typedef double by_seed[MAX_SEEDS];

static void put_estimate(const double *x, double scale, int decimals) {
    by_seed scaled;
    for (long s = 0; s < set.seeds; s++) scaled[s] = scale * x[s];
    estimate e = estimate_of(scaled, (int)set.seeds, 0);
    if (e.n < 2) table_number(e.mean, decimals);
    else table_put("%.*f +-%.*f", decimals, e.mean, decimals, e.half);
}

/* 100 (a / b - 1), seed by seed. */
static void ratios(const double *a, const double *b, double *out) {
    for (long s = 0; s < set.seeds; s++) out[s] = b[s] > 0 || b[s] < 0 ? 100 * (a[s] / b[s] - 1) : 0;
}

/* The numbers of a result that the tables show. */
enum {
    LOSS, HELD, ROWS, ROWS_FAR, BYTES, AWAY, FAR, TOKENS, MOST, FIRST, SECOND, TIME, COMPUTING, EXCHANGING, WAITING,
    SHOWN
};
static by_seed found[METHODS][SHOWN];

static void keep(int m, long s, const result *r) {
    double values[SHOWN] = {r->loss,        r->held,        r->rows,       r->rows_off_machine, r->bytes,
                            r->remote,      r->off_machine, r->per_expert, r->most_per_expert,  r->first_half,
                            r->second_half, r->seconds,     r->computing,  r->exchanging,       r->waiting};
    for (int i = 0; i < SHOWN; i++) found[m][i][s] = values[i];
}

static void show_difference(int m, int against) {
    by_seed rows, held, loss;
    ratios(found[m][ROWS], found[against][ROWS], rows);
    ratios(found[m][HELD], found[against][HELD], held);
    ratios(found[m][LOSS], found[against][LOSS], loss);
    estimate r = estimate_of(rows, (int)set.seeds, 0), h = estimate_of(held, (int)set.seeds, 0);
    estimate l = estimate_of(loss, (int)set.seeds, 0);
    printf("%s against %s: %+.1f %% rows", methods[m].name, methods[against].name, r.mean);
    if (r.n > 1) printf(" [%+.1f, %+.1f]", r.mean - r.half, r.mean + r.half);
    printf(", %+.2f %% loss on held-out text", h.mean);
    if (h.n > 1) printf(" [%+.2f, %+.2f]", h.mean - h.half, h.mean + h.half);
    printf(", %+.2f %% while training", l.mean);
    if (l.n > 1) printf(" [%+.2f, %+.2f]", l.mean - l.half, l.mean + l.half);
    printf("%s\n", n_ranks == 1 ? "; with one rank nothing is sent" : "");
}

static void show_comparison(void) {
    table_new(1);
    table_heads("method|loss, held out|loss, training|rows per step|rows to other machines|kB per step|remote "
                "assignments, %|tokens per expert|busiest expert|assignments per token, first half|second half");
    for (int m = 0; m < METHODS; m++) {
        table_row();
        table_put("%s", methods[m].name);
        put_estimate(found[m][HELD], 1, 3);
        put_estimate(found[m][LOSS], 1, 3);
        put_estimate(found[m][ROWS], 1, 0);
        put_estimate(found[m][ROWS_FAR], 1, 0);
        put_estimate(found[m][BYTES], 1e-3, 1);
        put_estimate(found[m][AWAY], 100, 1);
        put_estimate(found[m][TOKENS], 1, 1);
        put_estimate(found[m][MOST], 1, 0);
        put_estimate(found[m][FIRST], 1, 2);
        put_estimate(found[m][SECOND], 1, 2);
    }
    printf("\nMeans over %ld seeds with 95 %% intervals; loss in nats per token; rows, kB and tokens of all ranks and "
           "layers\n",
           set.seeds);
    table_print();
    table_report("Loss and traffic", "Means over seeds with 95 % intervals.");
    table_new(1);
    table_heads("method|ms per step|computation|exchange|waiting");
    for (int m = 0; m < METHODS; m++) {
        table_row();
        table_put("%s", methods[m].name);
        for (int i = TIME; i <= WAITING; i++) put_estimate(found[m][i], 1e3, 2);
    }
    printf("Time of a step\n");
    table_print();
    table_report("Time of a step", "Milliseconds, means over ranks, with 95 % intervals over seeds.");
    for (int m = LOCMOE; m < METHODS; m++) show_difference(m, SWITCH); /* the paper's baseline */
    printf("Capacity and affinity choose among all tokens of a batch, including later ones: these losses are for "
           "reading text, not for writing it token by token.\n");
}

/* Sets the fields of the methods from the options. */
static void fill_fields(void) {
    snprintf(method_fields[BASELINE], sizeof method_fields[0], "top_k=2 loss_balance=0.01 capacity_factor=%g",
             set.factor);
    snprintf(method_fields[SWITCH], sizeof method_fields[0],
             "top_k=1 weight=raw loss_balance=0.01 balance_over=first capacity_factor=%g", set.factor);
    snprintf(method_fields[PLUS], sizeof method_fields[0], "%s", set.plus);
    snprintf(method_fields[SHARED], sizeof method_fields[0],
             "affinity_sum_auto=0 affinity_mass=0.77 n_shared=1 scale=2 %s", set.plus);
    snprintf(method_fields[CONTROL], sizeof method_fields[0], "top_k=1 weight=raw capacity_factor=0.7 n_shared=1");
}

static void compare(void) {
    double *loads = (double *)grab((size_t)(set.layers * set.experts), sizeof *loads);
    fill_fields();
    if (rank == 0)
        printf("%ld steps of %ld tokens on %d ranks, %d machines; %ld layers of %ld experts of width %ld; capacity "
               "factor of the baselines %g\n",
               set.steps, set.batch * set.context, n_ranks, machines(), set.layers, set.experts,
               set.d_ff > 0 ? set.d_ff : 2 * set.width, set.factor);
    for (long s = 0; s < set.seeds; s++)
        for (int m = 0; m < METHODS; m++) {
            uint64_t seed = (uint64_t)(set.seed + s);
            moe_layer_config experts;
            moe_net net;
            moe_trainer trainer;
            result r;
            configure(&methods[m], &experts);
            build(&net, &experts, seed, &transport);
            train_with(&trainer, &net, seed, most_sequences());
            agree(&experts, &trainer);
            train(&trainer, seed, 0, &r);
            judge(&net, &r, loads);
            keep(m, s, &r);
            moe_trainer_free(&trainer);
            moe_net_free(&net);
            if (rank == 0) {
                printf("seed %ld, %-22s loss %.3f, held out %.3f, %7.0f rows, %6.2f ms per step\n", set.seed + s,
                       methods[m].name, r.loss, r.held, r.rows, 1e3 * r.seconds);
                fflush(stdout);
            }
        }
    say_crowded();
    if (rank == 0) show_comparison();
    free(loads);
}

/* ---- --measure ---- */

enum { MEASURED_TIMES = 7, MEASURED_BATCHES = 10, POWERS = 11 };

/* Simulates a batch of several processes: repeats this rank's rows. */
static size_t own_rows, all_rows;
static moe_status repeat_rows(void *ctx, moe_status status, size_t row_bytes, void *rows) {
    (void)ctx;
    for (size_t k = own_rows; k < all_rows && status == MOE_OK; k += own_rows)
        memcpy((char *)rows + k * row_bytes, rows, own_rows * row_bytes);
    return status;
}

/* Seconds of moe_route and of its backward pass, for the call's tokens as the first of a batch of
   `total` tokens. */
static void time_route(const moe_layer *layer, moe_call call, size_t total, double *forward, double *backward) {
    moe_batch batch = {.total = total, .lead = 1, .gather = repeat_rows};
    moe_router router = layer->router;
    moe_routing routing;
    size_t bytes;
    double there[MEASURED_TIMES], back[MEASURED_TIMES], began;
    for (int i = 0; i < MOE_ROUTER_PARAMETER_COUNT; i++) router.tensors[i] = layer->tensors[i];
    own_rows = call.n_tokens;
    all_rows = total;
    call.batch = &batch;
    must(moe_route_batch_size(&router, call.n_tokens, total, 1, &bytes), "measuring", NULL);
    void *memory = grab(bytes, 1);
    moe_real *dx = (moe_real *)grab(call.n_tokens * (size_t)set.width, sizeof *dx);
    for (int i = 0; i < MEASURED_TIMES; i++) {
        began = MPI_Wtime();
        must(moe_route(&router, &call, memory, bytes, &routing), "measuring", NULL);
        there[i] = MPI_Wtime() - began;
        for (size_t k = 0; k < routing.plan.offsets[set.experts]; k++) routing.d_weight_out[k] = (moe_real)0.01;
        began = MPI_Wtime();
        must(moe_route_backward(&router, &call, &routing, layer->gradients, dx, NULL), "measuring", NULL);
        back[i] = MPI_Wtime() - began;
    }
    *forward = median(there, MEASURED_TIMES);
    *backward = median(back, MEASURED_TIMES);
    free(memory);
    free(dx);
}

/* Seconds of the layer's passes, and how many rows its experts computed. */
static size_t time_layer(const moe_layer *layer, const moe_call *call, double *forward, double *backward) {
    size_t bytes, numbers = call->n_tokens * (size_t)set.width;
    double there[MEASURED_TIMES], back[MEASURED_TIMES], began;
    moe_layer_pass pass;
    must(moe_layer_work_size(layer, call->n_tokens, 1, &bytes), "measuring", NULL);
    void *memory = grab(bytes, 1);
    moe_real *y = (moe_real *)grab(numbers, sizeof *y), *dx = (moe_real *)grab(numbers, sizeof *dx);
    for (int i = 0; i < MEASURED_TIMES; i++) {
        began = MPI_Wtime();
        must(moe_layer_forward(layer, call, y, memory, bytes, &pass), "measuring", NULL);
        there[i] = MPI_Wtime() - began;
        began = MPI_Wtime();
        must(moe_layer_backward(layer, y, dx, NULL, &pass), "measuring", NULL);
        back[i] = MPI_Wtime() - began;
    }
    *forward = median(there, MEASURED_TIMES);
    *backward = median(back, MEASURED_TIMES);
    size_t rows = pass.routing.plan.offsets[set.experts];
    free(memory);
    free(y);
    free(dx);
    return rows;
}

/* Seconds of an update per parameter: clearing the gradient, summing its squares, AdamW. */
static double time_update(const moe_net *net, size_t n) {
    moe_real *a = (moe_real *)grab(4 * n, sizeof *a), squares = 0;
    moe_adamw_step step = {0};
    double took[MEASURED_TIMES];
    step.scale = 1;
    step.beta1 = (moe_real)0.9;
    step.beta2 = (moe_real)0.999;
    step.epsilon = (moe_real)1e-8;
    step.correction1 = 10;
    step.correction2 = 1000;
    step.lr = (moe_real)1e-3;
    for (int i = 0; i < MEASURED_TIMES; i++) {
        double began = MPI_Wtime();
        memset(a, 0, n * sizeof *a);
        squares += moe_dot(net->kernels, n, a, a);
        moe_adamw(net->kernels, &step, n, a, a + n, a + 2 * n, a + 3 * n);
        took[i] = MPI_Wtime() - began;
    }
    free(a);
    return median(took, MEASURED_TIMES) / (double)n + 0 * (double)squares;
}

static const moe_layer *first_mixture(const moe_net *net) {
    size_t i = 0;
    while (net->modules[i].kind != MOE_MODULE_MIXTURE) i++;
    return &net->modules[i].layer;
}

/* Writes the number of arrays that every rank gathers of all tokens, and their bytes per token
   besides the logits: padding, machines, a bound of the capacity in every call. */
static void put_gathers(FILE *f, const moe_router_config *c, const moe_call *call) {
    int homes = call->token_machine != NULL && c->loss_locality > 0, bound = c->capacity_bound == MOE_BOUND_EVERY;
    fprintf(f, "gathers %d\ngather_bytes %d\n", 2 + homes + bound, 1 + homes * 4 + bound * (int)sizeof(moe_real));
}

/* Writes times per row at an expert and, of routing, per token of all ranks. */
static void put_times(FILE *f, const moe_layer *layer, const moe_call *call) {
    size_t n = call->n_tokens, rows;
    double route[2], larger[2], whole[2], per_row[2], grows;
    time_route(layer, *call, n, &route[0], &route[1]);
    time_route(layer, *call, 4 * n, &larger[0], &larger[1]);
    rows = time_layer(layer, call, &whole[0], &whole[1]);
    for (int i = 0; i < 2; i++) per_row[i] = whole[i] > route[i] && rows > 0 ? (whole[i] - route[i]) / (double)rows : 0;
    grows = (larger[0] + larger[1] - route[0] - route[1]) / (3 * (double)n);
    fprintf(f, "expert_forward %.4g\nexpert_backward %.4g\nroute %.4g\n", per_row[0], per_row[1],
            grows > 0 ? grows : 0);
}

/* Writes costs and sizes of a method. */
static void put_costs(FILE *f, const moe_net *net, uint64_t seed) {
    const moe_layer *layer = first_mixture(net);
    const moe_router_config *c = &layer->config.router;
    size_t numbers = (size_t)(set.batch * set.context * set.width), all = 0;
    size_t of_experts = 0;
    share s = share_of((size_t)set.batch, 0);
    moe_rng rng;
    moe_real *x = (moe_real *)grab(numbers, sizeof *x);
    moe_rng_seed(&rng, seed);
    for (size_t i = 0; i < numbers; i++) x[i] = moe_rng_normal(&rng);
    share_point(&s);
    s.call.n_tokens = numbers / (size_t)set.width;
    s.call.x = x;
    s.call.training = 1;
    s.call.rng = &rng;
    for (size_t i = 0; i < net->n_tensors; i++) {
        all += net->tensors[i].count;
        if (strstr(net->tensors[i].name, ".experts.") != NULL) of_experts += net->tensors[i].count;
    }
    fprintf(f, "top_k %d\ncapacity_factor %g\n", c->top_k, (double)c->capacity_factor);
    put_times(f, layer, &s.call);
    put_gathers(f, c, &s.call);
    fprintf(f, "optimizer %.4g\nshared_numbers %.0f\nexpert_numbers %.0f\n", time_update(net, all),
            (double)(all - of_experts), (double)of_experts / (double)(set.layers * set.experts));
    if (c->score == MOE_SCORE_GRAP) fprintf(f, "experts_most %d\n", c->d_model);
    free(x);
    share_free(&s);
}

/* Adds to out[i] the imbalance of 2^i ranks: the most rows of a rank divided by the mean. */
static void add_balance(const double *rows, double *out) {
    size_t experts = (size_t)set.experts, first, count;
    double all = 0;
    for (size_t e = 0; e < experts; e++) all += rows[e];
    for (int i = 0; i < POWERS && 1 << i <= set.experts; i++) {
        double most = 0;
        for (int k = 0; k < 1 << i; k++) {
            double sum = 0;
            moe_rank_part(experts, k, 1 << i, &first, &count);
            for (size_t e = first; e < first + count; e++) sum += rows[e];
            most = sum > most ? sum : most;
        }
        out[i] += all > 0 ? most * (1 << i) / all : 1;
    }
}

/* The imbalance of 2^i ranks, i < POWERS: mean over MoE layers and some batches after training. */
static void balance(const moe_net *net, uint64_t seed, uint64_t step, double *out) {
    share s = share_of((size_t)set.batch, 0);
    size_t bytes, times = 0, experts = (size_t)set.experts;
    moe_rng rng;
    share_point(&s);
    moe_rng_seed(&rng, seed);
    must(moe_net_work_size(net, most_sequences() * (size_t)set.context, 1, &bytes), "measuring", NULL);
    void *work = grab(bytes, 1);
    double *rows = (double *)grab(experts, sizeof *rows);
    int32_t *places = (int32_t *)grab(s.n + 1, sizeof *places);
    for (size_t i = 0; i <= s.n; i++) places[i] = (int32_t)(i * (size_t)set.context);
    memset(out, 0, POWERS * sizeof *out);
    for (int b = 0; b < MEASURED_BATCHES; b++) {
        moe_call call = s.call;
        moe_net_pass pass;
        draw(&s, seed, step + (uint64_t)b);
        call.n_tokens = s.data.n;
        call.token_ids = s.data.token_ids;
        call.sequences = places;
        call.n_sequences = s.n;
        call.training = 1;
        call.rng = &rng;
        must(moe_net_forward(net, &call, work, bytes, &pass), "measuring", NULL);
        for (size_t m = 0; m < net->n_modules; m++) {
            /* of the whole batch, or with local routing of this rank's tokens */
            const moe_routing *r = moe_net_routing(net, &pass, m);
            if (r == NULL) continue;
            memset(rows, 0, experts * sizeof *rows);
            for (size_t i = 0; i < r->n_tokens * experts; i++) rows[i % experts] += r->selected[i];
            if (transport.local_routing) add_up(experts, rows);
            add_balance(rows, out);
            times++;
        }
    }
    for (int i = 0; i < POWERS; i++) out[i] /= (double)times;
    free(work);
    free(rows);
    free(places);
    share_free(&s);
}

/* Seconds of an exchange of the transport in which two ranks send each other `bytes` bytes: the
   sixth shortest of a hundred, because other processes may use the processors. */
static double ping(size_t bytes) {
    unsigned char *out = (unsigned char *)grab(bytes, 1), *in = (unsigned char *)grab(bytes, 1);
    size_t counts[2] = {1, 1}, at[2] = {0, 0};
    moe_exchange x = {bytes, out, counts, at, in, counts, at, 0};
    double took[100];
    counts[rank] = 0;
    for (int i = 0; i < 100; i++) {
        double began = MPI_Wtime();
        must(transport.rows(transport.ctx, MOE_EXCHANGE_BEGIN | MOE_EXCHANGE_END, &x), "measuring", NULL);
        took[i] = MPI_Wtime() - began;
    }
    free(out);
    free(in);
    (void)median(took, 100); /* sorts */
    return took[5];
}

/* Writes the head into an empty file, and with two ranks the times of their exchanges. */
static void put_head(FILE *f) {
    double bytes = 1 << 18, small = n_ranks == 2 ? ping(4) : 0;
    double large = n_ranks == 2 ? ping((size_t)bytes) : 0;
    if (rank != 0) return;
    if (ftell(f) == 0)
        fprintf(f, "moe-scale 1\ncores %ld\nreal_bytes %d\nd_model %ld\nexperts %ld\nlayers %ld\n",
                sysconf(_SC_NPROCESSORS_ONLN), (int)sizeof(moe_real), set.width, set.experts, set.layers);
    if (n_ranks == 2 && large > small)
        fprintf(f, "near_latency %.4g\nnear_bandwidth %.4g\n", small, (bytes - 4) / (large - small));
}

/* Writes one run of a method; step: the median of the slowest rank; even: from balance. */
static void put_run(FILE *f, const result *r, double step, const double *even) {
    double assigned = r->per_expert * (double)set.experts;
    int i = 0;
    fprintf(f, "run %d\ntokens %ld\nranks_per_machine %d\ntwo_level %ld\nchunks %ld\nlocal_routing %d\n", n_ranks,
            set.batch * set.context, transport.ranks_per_machine > 0 ? transport.ranks_per_machine : n_ranks,
            set.two_level, set.chunks, transport.local_routing);
    fprintf(f, "step %.4g\ncompute %.4g\nexchange %.4g\nwaiting %.4g\n", step, r->computing, r->exchanging, r->waiting);
    fprintf(f,
            "assignments %.6g\nassignments_remote %.6g\nassignments_off_machine %.6g\nrows_sent %.6g\nbytes_sent "
            "%.8g\nloss %.4f\n",
            assigned, assigned * r->remote, assigned * r->off_machine, r->rows / (double)set.layers, r->bytes, r->loss);
    while (1 << i < n_ranks) i++;
    if (1 << i == n_ranks) fprintf(f, "imbalance %.4f\n", even[i]);
    for (i = 1; i < POWERS && 1 << i <= set.experts && n_ranks == 1; i++)
        fprintf(f, "imbalance_at_%d %.4f\n", 1 << i, even[i]);
}

/* Trains with a method and appends the measurements to f, which only rank 0 has. */
static void measure_method(FILE *f, int m, const char *name) {
    size_t first;
    double even[POWERS], own, *steps = (double *)grab((size_t)n_ranks, sizeof *steps);
    double *loads = (double *)grab((size_t)(set.layers * set.experts), sizeof *loads);
    moe_layer_config experts;
    moe_net net;
    moe_trainer trainer;
    result r;
    step_times = (double *)grab((size_t)set.steps, sizeof *step_times);
    configure(&methods[m], &experts);
    build(&net, &experts, (uint64_t)set.seed, &transport);
    train_with(&trainer, &net, (uint64_t)set.seed, most_sequences());
    agree(&experts, &trainer);
    train(&trainer, (uint64_t)set.seed, 0, &r);
    first = (size_t)(r.steps / 10);
    own = median(step_times + first, (size_t)r.steps - first);
    gather(1, &own, steps);
    for (int i = 0; i < n_ranks; i++) own = steps[i] > own ? steps[i] : own;
    balance(&net, (uint64_t)set.seed, (uint64_t)set.steps, even);
    judge(&net, &r, loads);
    if (rank == 0) {
        fprintf(f, "method %s\n", name);
        if (n_ranks == 1) put_costs(f, &net, (uint64_t)set.seed);
        put_run(f, &r, own, even);
        printf("%-16s %8.2f ms per step; %.2f computing, %.2f exchanging, %.2f waiting; %.0f rows, %.1f kB and %.1f kB "
               "of sums; %.1f %% off machine; held out %.4f\n",
               name, 1e3 * own, 1e3 * r.computing, 1e3 * r.exchanging, 1e3 * r.waiting, r.rows, r.bytes / 1e3,
               r.bytes_sums / 1e3, 100 * r.off_machine, r.held);
        fflush(stdout);
    }
    moe_trainer_free(&trainer);
    moe_net_free(&net);
    free(step_times);
    free(steps);
    free(loads);
    step_times = NULL;
}

/* Whether a list "one,two" has the name. */
static int is_listed(const char *list, const char *name) {
    size_t length = strlen(name);
    for (size_t n; (n = strcspn(list, ",")) > 0; list += n + (list[n] == ','))
        if (n == length && strncmp(list, name, n) == 0) return 1;
    return 0;
}

static void measure(void) {
    static const struct {
        const char *name;
        int method;
    } known[] = {{"baseline", BASELINE}, {"top1", SWITCH}, {"locmoe", LOCMOE}, {"locmoe_plus", PLUS}};
    FILE *f = rank == 0 ? fopen(set.measure, "ab") : NULL;
    moe_status status = rank == 0 && (f == NULL || fseek(f, 0, SEEK_END) != 0) ? MOE_ERR_IO : MOE_OK;
    must(moe_transport_status(&transport, status), set.measure, NULL);
    fill_fields();
    put_head(f);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (is_listed(set.methods != NULL ? set.methods : "baseline,locmoe,locmoe_plus", known[i].name))
            measure_method(f, known[i].method, known[i].name);
    must(moe_transport_status(&transport, rank == 0 && fclose(f) != 0 ? MOE_ERR_IO : MOE_OK), set.measure, NULL);
}

/* ---- --check: the transport alone ---- */

static long passed, failed;

static void check(int good, const char *what) {
    if (good) passed++;
    else {
        failed++;
        fprintf(stderr, "FAILED on rank %d: %s\n", rank, what);
    }
}

/* The number of rows from rank a to rank b in round i; many are 0. */
static size_t rows_between(int a, int b, int i) {
    return (size_t)((a * 7 + b * 5 + i * 3) % 4 == 0 ? 0 : (a + 2 * b + i) % 9);
}

/* Byte k of row j from a to b. */
static unsigned char byte_between(int a, int b, size_t j, size_t k) {
    return (unsigned char)((size_t)a * 31 + (size_t)b * 17 + j * 7 + k);
}

enum { CHECK_ROWS = 9 };

typedef struct parcel {
    moe_exchange x;
    size_t counts[4][MAX_RANKS];
    unsigned char *out, *in;
} parcel;

static void pack(parcel *p, int round, size_t row_bytes) {
    memset(p, 0, sizeof *p);
    p->out = (unsigned char *)grab((size_t)(n_ranks + 1) * CHECK_ROWS * row_bytes, 1);
    p->in = (unsigned char *)grab((size_t)(n_ranks + 1) * (CHECK_ROWS + 1) * row_bytes, 1);
    for (int r = 0; r < n_ranks; r++) { /* positions with gaps, also before the first; received in reverse order */
        p->counts[0][r] = rows_between(rank, r, round);
        p->counts[1][r] = (size_t)(r + 1) * CHECK_ROWS;
        p->counts[2][r] = rows_between(r, rank, round);
        p->counts[3][r] = (size_t)(n_ranks - r) * (CHECK_ROWS + 1);
        for (size_t i = 0; i < p->counts[0][r] * row_bytes; i++)
            p->out[p->counts[1][r] * row_bytes + i] = byte_between(rank, r, i / row_bytes, i % row_bytes);
    }
    p->x.row_bytes = row_bytes;
    p->x.send = p->out;
    p->x.receive = p->in;
    p->x.channel = round % MOE_EXCHANGES;
    p->x.send_counts = p->counts[0];
    p->x.send_at = p->counts[1];
    p->x.receive_counts = p->counts[2];
    p->x.receive_at = p->counts[3];
}

static int arrived(const parcel *p) {
    size_t row_bytes = p->x.row_bytes, wrong = 0;
    for (int r = 0; r < n_ranks; r++)
        for (size_t i = 0; i < (CHECK_ROWS + 1) * row_bytes; i++) {
            unsigned char want =
                i < p->counts[2][r] * row_bytes ? byte_between(r, rank, i / row_bytes, i % row_bytes) : 0;
            wrong += p->in[p->counts[3][r] * row_bytes + i] != want;
        }
    return wrong == 0;
}

static void unpack(parcel *p) {
    free(p->out);
    free(p->in);
}

static void check_rows(void) {
    static parcel one, two;
    size_t sizes[] = {1, 3, 4, 64, 1000, 100001};
    for (int round = 0; round < 12; round++) {
        pack(&one, 2 * round, sizes[round % 6]);
        pack(&two, 2 * round + 1, sizes[(round + 1) % 6]);
        int good = transport.rows(transport.ctx, MOE_EXCHANGE_BEGIN, &one.x) == MOE_OK &&
                   transport.rows(transport.ctx, MOE_EXCHANGE_BEGIN, &two.x) == MOE_OK;
        good = good && transport.rows(transport.ctx, MOE_EXCHANGE_END, &one.x) == MOE_OK && arrived(&one);
        good = good && transport.rows(transport.ctx, MOE_EXCHANGE_END, &two.x) == MOE_OK;
        check(good && arrived(&two), "two exchanges of rows at a time");
        unpack(&two);
        memset(one.in, 0, (size_t)(n_ranks + 1) * (CHECK_ROWS + 1) * one.x.row_bytes);
        check(transport.rows(transport.ctx, MOE_EXCHANGE_BEGIN | MOE_EXCHANGE_END, &one.x) == MOE_OK && arrived(&one),
              "an exchange at once");
        unpack(&one);
    }
}

static void check_counts(void) {
    for (size_t n = 0; n < 5; n++) {
        uint64_t *out = (uint64_t *)grab(n * (size_t)n_ranks, sizeof *out);
        uint64_t *in = (uint64_t *)grab(n * (size_t)n_ranks, sizeof *in), wrong = 0;
        for (size_t i = 0; i < n * (size_t)n_ranks; i++)
            out[i] = ((uint64_t)rank << 40) + i / (n > 0 ? n : 1) * 100 + i % (n > 0 ? n : 1);
        moe_status status = transport.counts(transport.ctx, n, out, in);
        for (size_t i = 0; i < n * (size_t)n_ranks; i++)
            wrong += in[i] != ((uint64_t)(i / n) << 40) + (uint64_t)rank * 100 + i % n;
        check(status == MOE_OK && wrong == 0, "an exchange of counts");
        free(out);
        free(in);
    }
}

/* A number with many digits for element i of rank r. */
static moe_real number_of(int r, size_t i) {
    return (moe_real)sin((double)(i + 1) * 0.37 + r) / (moe_real)(1 + (i + (size_t)r) % 7);
}

/* How many values a rank sends for a sum of n. */
static size_t sent_for_sum(size_t n) {
    size_t first, own, others = (size_t)n_ranks - 1;
    moe_rank_part(n, rank, n_ranks, &first, &own);
    return n <= MOEI_MPI_FEW ? n * others : n - own + own * others;
}

static size_t sent_so_far(void) {
    size_t sent = 0;
    for (int r = 0; r < n_ranks; r++) sent += (size_t)mpi.sum_bytes[r] / sizeof(moe_real);
    return sent;
}

static void check_sums(void) {
    static const size_t sizes[] = {0, 1, 2, 5, 511, 512, 513, 1000, 70001};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        moe_real *x = (moe_real *)grab(sizes[k], sizeof *x);
        size_t wrong = 0, sent = sent_so_far();
        for (size_t i = 0; i < sizes[k]; i++) x[i] = number_of(rank, i);
        moe_status status = transport.sum(transport.ctx, sizes[k], x);
        for (size_t i = 0; i < sizes[k]; i++) {
            volatile moe_real sum = number_of(0, i); /* to the bit: in the order of ranks */
            for (int r = 1; r < n_ranks; r++) sum += number_of(r, i);
            moe_real want = sum;
            wrong += memcmp(&want, &x[i], sizeof want) != 0;
        }
        check(status == MOE_OK && wrong == 0, "a sum over ranks");
        check(sent_so_far() - sent == sent_for_sum(sizes[k]), "bytes that are sent for a sum");
        free(x);
    }
}

/* Errors that are detected without communication. */
static void check_refusals(void) {
    size_t many[MAX_RANKS] = {0}, none[MAX_RANKS] = {0};
    moe_exchange x = {.row_bytes = 0,
                      .send_counts = many,
                      .send_at = none,
                      .receive_counts = none,
                      .receive_at = none,
                      .channel = MOE_EXCHANGES};
    if (n_ranks == 1) return;
    check(moei_mpi_rows(&mpi, MOE_EXCHANGE_BEGIN, &x) == MOE_ERR_TRANSPORT && strstr(mpi.error, "channel") != NULL,
          "an invalid channel");
    many[1] = (size_t)INT_MAX + 1;
    int numbers[4 * 64];
    check(n_ranks > 64 || moei_mpi_numbers(&mpi, &x, numbers) == MOE_ERR_TRANSPORT, "more rows than MPI can count");
    x.send_counts = none;
    x.send_at = many;
    check(n_ranks > 64 || (moei_mpi_numbers(&mpi, &x, numbers) == MOE_OK && numbers[n_ranks + 1] == 0),
          "the position of no rows");
    MPI_Datatype type;
    check(moei_mpi_type(&mpi, 0, &type) == MOE_ERR_TRANSPORT &&
              moei_mpi_type(&mpi, (size_t)INT_MAX + 1, &type) == MOE_ERR_TRANSPORT,
          "rows of no bytes, or too many");
    for (size_t bytes = 1; bytes < 30; bytes++)
        check(moei_mpi_type(&mpi, bytes, &type) == MOE_OK, "more types than are kept");
    mpi.error[0] = '\0';
}

/* The last rank comes late: the others count that as waiting if there are barriers, else as
   exchange. */
static void check_times(int timed) {
    struct timespec late = {.tv_nsec = 100000000};
    uint64_t out[MAX_RANKS] = {0}, in[MAX_RANKS];
    double *grows = timed ? &mpi.waiting : &mpi.exchanging, timeout = mpi.timeout;
    moe_status status = transport.counts(transport.ctx, 1, out, in);
    int seen = n_ranks == 1 || rank == n_ranks - 1;
    mpi.timed = timed;
    mpi.timeout = 0; /* no limit */
    for (int i = 0; i < 5; i++) { /* on a busy machine the others are late as well, but not always */
        mpi.waiting = mpi.exchanging = 0;
        if (rank == n_ranks - 1) nanosleep(&late, NULL);
        if (status == MOE_OK) status = transport.counts(transport.ctx, 1, out, in);
        if (*grows > 0.08) seen = 1;
    }
    check(status == MOE_OK && seen, "time is measured");
    mpi.timed = 1;
    mpi.timeout = timeout;
}

/* The message of a rank that has waited too long: which rank does not answer or waits elsewhere.
   Uses a transport of its own, which is unusable afterwards. */
static void check_lost(void) {
    static uint64_t out[MAX_RANKS], in[MAX_RANKS]; /* an exchange that never ends may still write there */
    struct timespec sleep = {.tv_sec = 24}; /* others may be late by seconds on a busy machine */
    char name[80];
    moe_mpi lost;
    int last = n_ranks - 1, opened = moe_mpi_open(&lost, MPI_COMM_WORLD, 8) == MOE_OK;
    check(opened, "a second transport");
    if (n_ranks != 3 || !opened) { /* it takes half a minute: once is enough */
        moe_mpi_close(&lost);
        return;
    }
    lost.doing = MOEI_MPI_SUM;
    lost.calls = 5;
    check(moei_mpi_lost(&lost, 1) == MOE_ERR_TRANSPORT && strstr(lost.error, "a message was lost") != NULL,
          "all wait in the same place");
    moei_mpi_counts(&mpi, 1, out, in);
    if (rank == last) {
        lost.doing = MOEI_MPI_ROWS;
        lost.calls = 7;
    }
    snprintf(name, sizeof name, "rank %d waits in %s, its call %d", rank == last ? 0 : last,
             rank == last ? "a sum" : "an exchange of rows", rank == last ? 5 : 7);
    check(moei_mpi_lost(&lost, 1) == MOE_ERR_TRANSPORT && strstr(lost.error, name) != NULL &&
              strstr(lost.error, "same calls") != NULL,
          "one waits elsewhere");
    snprintf(name, sizeof name, "rank %d does not answer", last);
    if (rank == 0) lost.calls++; /* the others are elsewhere, which is not what it complains of */
    else lost.timeout = 14; /* rank 1 still waits when it is asked, and answers */
    if (rank == last) nanosleep(&sleep, NULL);
    else
        check(moei_mpi_counts(&lost, 1, out, in) == MOE_ERR_TRANSPORT && strstr(lost.error, name) != NULL,
              "one does not answer");
    if (rank == 0) check(strstr(lost.error, "rank 1 ") == NULL, "those that answer are not blamed");
}

static void check_parts(void) {
    size_t first, n, next = 0;
    for (int r = 0; r < n_ranks; r++) {
        moe_rank_part(37, r, n_ranks, &first, &n);
        check(first == next && part_of(first, 37, n_ranks) == r && (n == 0 || part_of(first + n - 1, 37, n_ranks) == r),
              "parts of ranks");
        next = first + n;
    }
}

static int check_all(void) {
    double sums[2];
    watch(1);
    for (int timed = 0; timed < 2; timed++) {
        mpi.timed = timed;
        check_counts();
        check_rows();
        check_sums();
    }
    check_refusals();
    check_parts();
    check_times(0);
    check_times(1);
    check_lost();
    check_counts();
    check(mpi.calls == 0 || n_ranks > 1, "one rank needs no exchange");
    sums[0] = (double)passed;
    sums[1] = (double)failed;
    add_up(2, sums);
    if (rank == 0) printf("%.0f passed, %.0f failed\n", sums[0], sums[1]);
    return sums[1] > 0;
}

/* ---- the program ---- */

static int exists(const char *path) {
    FILE *f = path != NULL ? fopen(path, "rb") : NULL;
    if (f != NULL) fclose(f);
    return f != NULL;
}

static void resume(moe_trainer *t) {
    moe_error error = {0};
    if (!set.resume) return;
    must(moe_trainer_load(t, set.checkpoint, &error), set.checkpoint, &error);
    if (t->steps >= (uint64_t)set.steps) {
        language_error(&error, MOE_ERR_STATE, "is at step %.0f: with --steps %ld nothing is left to do",
                       (double)t->steps, set.steps);
        end_all(error.code, set.checkpoint, &error);
    }
    saved_step = t->steps;
    if (rank == 0) printf("%s: continues after step %.0f of %ld\n", set.checkpoint, (double)t->steps, set.steps);
}

/* Loads a model of any number of ranks; replaces the options for its shape. */
static void load(moe_net *net, moe_layer_config *experts) {
    moe_error error = {0};
    int alike = 1;
    must(moe_net_load_part(net, set.load, 1, kernels, &transport, NULL, &error), set.load, &error);
    set.layers = 0;
    for (size_t i = 0; i < net->n_modules; i++) {
        const moe_layer *layer = &net->modules[i].layer;
        if (net->modules[i].kind != MOE_MODULE_MIXTURE) continue;
        if (set.layers++ > 0 && set.experts != layer->config.router.n_experts) alike = 0;
        set.experts = layer->config.router.n_experts;
        *experts = layer->config;
    }
    experts->transport = NULL;
    if (set.layers < 1 || set.layers > MAX_LAYERS || !alike || net->d_in != 0 || net->d_out != vocabulary.size)
        language_error(&error, MOE_ERR_CONFIG,
                       "is not a network of these tokens (%d, not %d) with MoE layers of as many experts", net->d_out,
                       vocabulary.size);
    must(error.code, set.load, &error);
}

static void run(void) {
    method chosen = {"", set.router, ""};
    moe_layer_config experts;
    moe_net net;
    moe_trainer trainer;
    moe_error error = {0};
    result r;
    double *loads;
    memset(&r, 0, sizeof r);
    memset(&trainer, 0, sizeof trainer);
    if (set.load != NULL) load(&net, &experts);
    else {
        configure(&chosen, &experts);
        build(&net, &experts, (uint64_t)set.seed, &transport);
    }
    loads = (double *)grab((size_t)(set.layers * set.experts), sizeof *loads);
    if (rank == 0)
        printf("%.0f training tokens, %.0f held out, vocabulary %d; %d ranks on %d machines, %ld experts in each "
               "of %ld layers; kernels %s\n",
               (double)train_text.n, (double)held_text.n, vocabulary.size, n_ranks, machines(), set.experts, set.layers,
               net.kernels->name);
    if (set.steps > 0) {
        train_with(&trainer, &net, (uint64_t)set.seed, most_sequences());
        resume(&trainer);
        agree(&experts, &trainer);
        if (set.threads_too) step_times = (double *)grab((size_t)set.steps, sizeof *step_times);
        train(&trainer, (uint64_t)set.seed, 1, &r);
    }
    judge(&net, &r, loads);
    if (set.steps > 0) say_crowded();
    if (rank == 0 && set.steps > 0) show_result(&r);
    if (rank == 0) {
        printf("held out: loss %.9g, perplexity %.2f\n", r.held, exp(r.held));
        report_run(&r, loads);
    }
    if (set.save != NULL) {
        must(moe_net_save(&net, set.save, &error), set.save, &error);
        if (rank == 0) printf("saved as %s\n", set.save);
    }
    if (trainer.steps < (uint64_t)set.steps && rank == 0 && set.checkpoint != NULL)
        printf("stopped; %s holds step %.0f: the same command with --resume continues\n", set.checkpoint,
               (double)trainer.steps);
    if (set.threads_too && set.steps > 0) compare_threads(&experts, r.steps);
    moe_trainer_free(&trainer);
    moe_net_free(&net);
    free(loads);
    free(step_times);
}

static void begin_transport(void) {
    moe_error error = {0};
    if (set.ranks_per_machine == 0 && set.machines > 0 && n_ranks % set.machines == 0)
        set.ranks_per_machine = n_ranks / set.machines;
    transport = moe_mpi_transport(&mpi);
    transport.chunks = (int)set.chunks;
    transport.two_level = (int)set.two_level;
    transport.ranks_per_machine = (int)set.ranks_per_machine;
    transport.local_routing = (int)set.local_routing;
    transport.traffic = &traffic;
    traffic.rows = (uint64_t *)grab((size_t)n_ranks, sizeof *traffic.rows);
    traffic.bytes = (uint64_t *)grab((size_t)n_ranks, sizeof *traffic.bytes);
    link_rows = (double *)grab(3 * (size_t)n_ranks * (size_t)n_ranks, sizeof *link_rows);
    link_bytes = link_rows + (size_t)n_ranks * (size_t)n_ranks;
    link_sums = link_bytes + (size_t)n_ranks * (size_t)n_ranks;
    must(moe_transport_begin(&transport, &error), "the transport", &error);
}

/* Checks the output files before training. */
static int check_files(void) {
    const char *const outputs[] = {set.save, set.checkpoint, set.measure, report_path};
    const char *twice = written_twice(outputs, 4, &set.text, 1);
    int wrong;
    char domain[1024];
    for (const char *at = set.domains, *one = domain; at != NULL && twice == NULL;) {
        size_t length = strcspn(at, ",");
        snprintf(domain, sizeof domain, "%.*s", (int)(length < sizeof domain ? length : 0), at);
        twice = written_twice(outputs, 4, &one, 1);
        at = at[length] == ',' ? at + length + 1 : NULL;
    }
    if (twice != NULL) {
        fail(twice, WRITTEN_TWICE);
        return EXIT_USAGE;
    }
    if (rank == 0 && (wrong = report_checked("mpi")) != 0) return wrong;
    if (set.resume && !exists(set.checkpoint)) return fail(set.checkpoint, "does not exist: nothing to resume");
    if (!set.resume && exists(set.checkpoint))
        return fail(set.checkpoint, "holds training that was stopped: --resume continues it; remove it to start over");
    if (set.save == NULL || rank != 0) return 0;
    return not_writable(set.save) != NULL ? fail(set.save, not_writable(set.save)) : 0;
}

/* Whether any rank has failed: a file may be missing on one alone. The first of them says why. */
static int any_failed(int wrong) {
    double own = wrong, *all = (double *)grab((size_t)n_ranks, sizeof *all);
    int first = 0;
    gather(1, &own, all);
    while (first < n_ranks && !(all[first] > 0)) first++;
    if (rank == first) fputs(unsaid, stderr);
    free(all);
    return first < n_ranks;
}

static int work(int count, char **words) {
    int wrong = read_options(count, words) ? EXIT_USAGE : check_files();
    if (moe_mpi_open(&mpi, MPI_COMM_WORLD, set.timeout) != MOE_OK) end_all(MOE_ERR_TRANSPORT, "the transport", NULL);
    mpi.timed = !set.untimed;
    transport = moe_mpi_transport(&mpi);
    if (any_failed(wrong)) {
        moe_mpi_close(&mpi);
        return wrong ? wrong : 1;
    }
    begin_transport();
    if (set.check) wrong = check_all();
    else {
        prepare();
        set.measure != NULL ? measure() : set.compare ? compare() : run();
    }
    if (rank == 0 && !wrong) wrong = report_write_added("mpi", "Experts on several machines");
    free(traffic.rows);
    free(traffic.bytes);
    free(link_rows);
    free(vocabulary.word);
    free(train_text.ids);
    free(held_text.ids);
    moe_buffer_free(&train_bytes);
    moe_buffer_free(&held_bytes);
    moe_transport_end(&transport);
    moe_mpi_close(&mpi);
    return wrong;
}

int main(int count, char **words) {
    int failed_here;
    for (int i = 1; i < count; i++)
        if (strcmp(words[i], "-h") == 0 || strcmp(words[i], "--help") == 0) return show_help();
    signal(SIGALRM, stuck);
    (void)alarm(600); /* for the start of MPI */
    if (MPI_Init(&count, &words) != MPI_SUCCESS) return fail("MPI", "does not start");
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &n_ranks);
    (void)alarm(0);
    failed_here = work(count, words);
    watch(1);
    MPI_Finalize();
    if (fflush(stdout) != 0 || ferror(stdout)) return fail("the output", "cannot be written");
    return failed_here;
}
