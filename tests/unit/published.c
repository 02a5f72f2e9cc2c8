/* Published MoE layers: files that tests/unit/published.py made (it needs python3; without it
   that part is skipped), and every way in which a file can be wrong.
     cc -std=c99 -O2 -I. tests/unit/published.c -o published -lm && ./published [SEED]
   "published hands" makes none of those files, which take most of its time.
   Runs in a folder from which tests/unit/published.py can be reached, and writes into a folder
   published-test there, which it removes. */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- files of another program ---- */

#define FOLDER "published-test"

/* The largest difference over the largest expected number; -1: the call failed. */
static double distance(const moe_layer *layer, size_t n, size_t d, const double *x, const double *expected,
                       moe_status *status) {
    moe_real *input = (moe_real *)grab(1, n * d * sizeof *input), *output = (moe_real *)grab(1, n * d * sizeof *output);
    moe_call call;
    size_t bytes = 0, i;
    double most = 0, size = 0;
    void *work;
    memset(&call, 0, sizeof call);
    for (i = 0; i < n * d; i++) input[i] = (moe_real)x[i];
    call.n_tokens = n;
    call.x = input;
    *status = moe_layer_work_size(layer, n, 0, &bytes);
    work = grab(1, bytes);
    if (*status == MOE_OK) *status = moe_layer_forward(layer, &call, output, work, bytes, NULL);
    for (i = 0; i < n * d && *status == MOE_OK; i++) {
        if (fabs((double)output[i] - expected[i]) > most) most = fabs((double)output[i] - expected[i]);
        if (fabs(expected[i]) > size) size = fabs(expected[i]);
        if (!moe_is_finite(output[i])) most = HUGE_VAL;
    }
    free(input);
    free(output);
    free(work);
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

static int n_values; /* cases with a file of values */

/* Gate, up and down of the experts to the bit, where a file NAME.values has them. */
static int has_values(const moe_layer *layer, const char *name) {
    static const int params[3] = {MOE_EXPERTS_GATE, MOE_EXPERTS_UP, MOE_EXPERTS_DOWN};
    const moe_layer_config *c = &layer->config;
    const size_t count = (size_t)c->router.n_experts * (size_t)c->router.d_model * (size_t)c->d_ff;
    char file[600];
    double *values;
    size_t i, off = 0;
    int k;
    FILE *f;
    sprintf(file, FOLDER "/%s.values", name);
    if ((f = fopen(file, "rb")) == NULL) return 1;
    fclose(f);
    n_values++;
    values = (double *)grab(3, count * sizeof *values);
    if (!read_doubles(file, values, 3 * count)) off = 1;
    for (k = 0; k < 3; k++)
        for (i = 0; i < count; i++) {
            const moe_real want = (moe_real)values[(size_t)k * count + i];
            off += memcmp(&want, &layer->tensors[params[k]][i], sizeof want) != 0;
        }
    free(values);
    return off == 0;
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
    if (sscanf(line, "%63s %511s %127s %31s %lu %lu %767s %31s %15s", name, path, prefix, preset, &n, &d, original,
               family, dtype) != 9) {
        CHECK(!"a line of cases.txt is malformed");
        return;
    }
    error.message[0] = '\0';
    memset(&layer, 0, sizeof layer);
    status = moe_import_layer(&layer, path, prefix, strcmp(preset, "-") != 0 ? preset : NULL, NULL, &error);
    sprintf(says, "%s (%s, %s): %.250s", name, family, dtype, error.message);
    if (!CHECK(status == MOE_OK, says)) return;
    CHECK(layer.config.router.d_model == (int)d && layer.gradients[MOE_EXPERTS_GATE] == NULL, says);
    xy = (double *)grab(1, 2 * n * d * sizeof *xy);
    sprintf(file, FOLDER "/%s.xy", name);
    CHECK(read_doubles(file, xy, 2 * n * d), file);
    sprintf(says, "%s (%s, %s): other values", name, family, dtype);
    CHECK(has_values(&layer, name), says);
    far = n > 0 ? distance(&layer, n, d, xy, xy + n * d, &status) : 0;
    sprintf(says, "%s (%s, %s): %g off", name, family, dtype, far);
    CHECK(far >= 0 && far <= 1e-5, says);
    if (far > *worst) *worst = far;
    free(xy);
    if (strcmp(original, "-") != 0) {
        for (i = 0; i < 4 && strcmp(dtype, dtype_names[i]) != 0;) i++;
        sprintf(file, FOLDER "/%s.out.safetensors", name);
        status = moe_import_save(&layer, file, strrchr(original, '=') + 1, family, i, &error);
        sprintf(says, "%s (%s, %s): %.250s", name, family, dtype, error.message);
        CHECK(status == MOE_OK, says);
    }
    moe_layer_free(&layer);
}

static int python(const char *what, const char *arguments) {
    char command[200];
    sprintf(command, "python3 tests/unit/published.py %s %s %s", what, FOLDER, arguments);
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
        if (getenv("REQUIRE_TOOLS") != NULL && strcmp(getenv("REQUIRE_TOOLS"), "1") == 0) CHECK(0);
        else test_skipped++;
        return;
    }
    if (!CHECK(python("make", seed) == 0)) return;
    cases = fopen(FOLDER "/cases.txt", "r");
    while (cases != NULL && fgets(line, sizeof line, cases) != NULL) {
        run_case(line, &worst);
        n++;
    }
    if (cases != NULL) fclose(cases);
    CHECK(n > 100 && n_values > 20);
    CHECK(python("check", "") == 0);
    printf("note: %lu models of another program: at most %.2g off\n", n, worst);
    CHECK(system("rm -rf " FOLDER) == 0);
}

/* ---- files by hand: lists of tensors ---- */

/* "name:dtype:shape" with spaces between; % stands for each of four experts. Width 6, experts 3
   wide. */
static const char mixtral[] =
    "gate.weight:F32:4,6 experts.%.w1.weight:F32:3,6 experts.%.w3.weight:F16:3,6 experts.%.w2.weight:BF16:6,3";
static const char qwen3[] = "gate.weight:F32:4,6 experts.%.gate_proj.weight:F32:3,6 experts.%.up_proj.weight:F16:3,6 "
                            "experts.%.down_proj.weight:BF16:6,3";
static const char fused[] = "gate.weight:F32:4,6 experts.gate_up_proj:F32:4,6,6 experts.down_proj:F64:4,6,3";
static const char llama4[] = "router.weight:F32:4,6 experts.gate_up_proj:F32:4,6,6 experts.down_proj:F32:4,3,6 "
                             "shared_expert.gate_proj.weight:F32:5,6 shared_expert.up_proj.weight:F32:5,6 "
                             "shared_expert.down_proj.weight:F32:6,5";
static const char gpt_oss[] =
    "router.weight:F32:4,6 router.bias:F32:4 experts.gate_up_proj:F32:4,6,6 experts.gate_up_proj_bias:F32:4,6 "
    "experts.down_proj:F32:4,3,6 experts.down_proj_bias:F32:4,6";
static const char correction[] = "gate.e_score_correction_bias:F32:4";
static const char shared_experts[] = "shared_experts.gate_proj.weight:F32:6,6 shared_experts.up_proj.weight:F32:6,6 "
                                     "shared_experts.down_proj.weight:F32:6,6";

enum { MOST = 1 << 16 };

typedef struct text {
    char p[MOST];
    size_t n;
} text;

static void put(text *t, const void *p, size_t n) {
    if (t->n + n > MOST) exit(2);
    memcpy(t->p + t->n, p, n);
    t->n += n;
}

static void put_text(text *t, const char *s) { put(t, s, strlen(s)); }

static void put_number(text *t, uint64_t value, int bytes) {
    char b[8];
    int i;
    for (i = 0; i < bytes; i++) b[i] = (char)(unsigned char)(value >> 8 * i & 0xffu);
    put(t, b, (size_t)bytes);
}

/* What a word of a list stands for: its name with the expert's number, bytes of its type,
   elements. */
typedef struct entry {
    char name[160], dtype[16], shape[64];
    size_t count, size;
} entry;

static size_t size_of(const char *dtype) {
    if (strcmp(dtype, "F64") == 0) return 8;
    return dtype[0] == 'F' && dtype[1] == '3' ? 4 : strcmp(dtype, "U8") == 0 || strncmp(dtype, "F8", 2) == 0 ? 1 : 2;
}

static void entry_of(entry *e, const char *word, size_t length, const char *prefix, int expert) {
    char copy[200], *name = copy, *colon, *p;
    size_t n;
    if (length >= sizeof copy) exit(2);
    memcpy(copy, word, length);
    copy[length] = '\0';
    colon = strchr(copy, ':');
    *colon = '\0';
    e->name[0] = '\0';
    if (name[0] == '/') name++; /* a name that stands elsewhere */
    else sprintf(e->name, "%s.", prefix);
    for (n = strlen(e->name); *name != '\0'; name++) {
        if (*name == '%') n += (size_t)sprintf(e->name + n, "%d", expert);
        else e->name[n++] = *name;
    }
    e->name[n] = '\0';
    p = strchr(colon + 1, ':');
    *p = '\0';
    strcpy(e->dtype, colon + 1);
    strcpy(e->shape, p + 1);
    for (e->count = 1, p = e->shape; *p != '\0'; p += strspn(p, ",")) e->count *= (size_t)strtol(p, &p, 10);
    e->size = e->count * size_of(e->dtype);
}

/* Whether a list has a word that begins as this one: its name. */
static int has_name(const char *list, const char *word) {
    const size_t n = strcspn(word, ": ");
    const char *p;
    if (list == NULL) return 0;
    for (p = list; *p != '\0';) {
        size_t length = strcspn(p, " "), name = strcspn(p, ": ");
        if (name == n && memcmp(p, word, n) == 0) return 1;
        p += length;
        p += strspn(p, " ");
    }
    return 0;
}

/* A safetensors file of lists: without those names in `without`; a later list with the same name
   takes a word's place. */
static void make_file(text *file, const char *prefix, const char *list, const char *more, const char *without) {
    static text header, data;
    const char *lists[2];
    entry e;
    size_t at = 0;
    int which, expert, first = 1;
    header.n = data.n = file->n = 0;
    lists[0] = list;
    lists[1] = more;
    put_text(&header, "{");
    for (which = 0; which < 2; which++) {
        const char *p = lists[which] != NULL ? lists[which] : "";
        while (*p != '\0') {
            const size_t length = strcspn(p, " ");
            const int each = memchr(p, '%', length) != NULL;
            for (expert = 0; expert < (each ? 4 : 1); expert++) {
                char numbers[300];
                entry_of(&e, p, length, prefix, expert);
                if (has_name(without, e.name + (strncmp(e.name, prefix, strlen(prefix)) == 0 ? strlen(prefix) + 1 : 0)))
                    continue;
                if (which == 0 && more != NULL && has_name(more, e.name + strlen(prefix) + 1)) continue;
                sprintf(numbers, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%lu,%lu]}",
                        first ? "" : ",", e.name, e.dtype, e.shape, (unsigned long)at, (unsigned long)(at + e.size));
                put_text(&header, numbers);
                for (at += e.size; data.n < at;) put_number(&data, data.n % 4 == 3 ? 0x3e : data.n * 7 % 32, 1);
                first = 0;
            }
            p += length;
            p += strspn(p, " ");
        }
    }
    put_text(&header, "}");
    put_number(file, header.n, 8);
    put(file, header.p, header.n);
    put(file, data.p, data.n);
}

static moe_import_source source(const char *name, const text *t) { return moe_import_memory(name, t->p, t->n); }

/* Reads, and sees to it that a failure says why and changes nothing. */
static moe_status try_read(moe_layer *layer, const moe_import_source *sources, size_t n, const char *prefix,
                           const char *preset, moe_error *error) {
    moe_layer before;
    moe_status status, again;
    memset(layer, 0x5a, sizeof *layer);
    before = *layer;
    error->message[0] = '\0';
    status = moe_import_read(layer, sources, n, prefix, preset, NULL, error);
    if (status != MOE_OK) {
        CHECK(memcmp(&before, layer, sizeof before) == 0);
        CHECK(error->message[0] != '\0' && error->code == status);
        again = moe_import_read(layer, sources, n, prefix, preset, NULL, NULL);
        CHECK(again == status);
    }
    return status;
}

/* Whether the settings of a layer are those of a list "field=value ...". */
static int has_settings(const moe_layer_config *c, const char *list) {
    char name[64], value[64], shown[64];
    const moe_field *field;
    while (*list != '\0') {
        const size_t length = strcspn(list, " "), n = strcspn(list, "=");
        memcpy(name, list, n);
        name[n] = '\0';
        memcpy(value, list + n + 1, length - n - 1);
        value[length - n - 1] = '\0';
        field = moe_field_find(moe_layer_fields(), name);
        if (field == NULL) return 0;
        moe_field_text(field, c, shown, sizeof shown);
        if (strcmp(shown, value) != 0) {
            printf("%s = %s, wanted %s\n", name, shown, value);
            return 0;
        }
        list += length;
        list += strspn(list, " ");
    }
    return 1;
}

/* ---- what is refused, and what settings come to be ---- */

typedef struct row {
    const char *list, *more, *without, *config, *prefix, *preset;
    moe_status status;
    const char *says; /* what the message must have in it; of a layer that is made, its settings */
} row;

#define AT "model.layers.3.mlp"

static const row rows[] = {
    {mixtral, NULL, NULL, NULL, AT, NULL, MOE_OK,
     "n_experts=4 top_k=2 d_model=6 d_ff=3 weight=softmax selection_bias=0 n_shared=0 bias_rate=0"},
    {mixtral, NULL, NULL,
     "{\"model_type\":\"mixtral\",\"num_experts_per_tok\":3,\"norm_topk_prob\":false,\"n_group\":4}", AT, NULL, MOE_OK,
     "top_k=3 weight=softmax groups=1"},
    {mixtral, NULL, NULL, "{\"model_type\":\"mixtral\"}", AT ".", NULL, MOE_OK, "top_k=2"},
    {mixtral, NULL, NULL, "{\"model_type\":\"a\\u0001\\u007f\\u00e9\"}", AT, NULL, MOE_ERR_UNSUPPORTED,
     "model_type = 'a\?\?\xc3\xa9': unknown family"},
    {mixtral, NULL, NULL, NULL, "model.layers.3", NULL, MOE_OK, "top_k=2"},
    {mixtral, NULL, NULL, NULL, "model.layers.3.block_sparse_moe", NULL, MOE_OK, "top_k=2"},
    {mixtral, NULL, NULL, NULL, "model.layers.3.feed_forward...", NULL, MOE_OK, "top_k=2"},
    {mixtral, NULL, NULL, NULL, AT, "dbrx", MOE_OK, "top_k=4 weight=p_norm"},
    {mixtral, NULL, NULL, "{\"model_type\":\"phimoe\",\"num_experts_per_tok\":2,\"router_jitter_noise\":0.02}", AT,
     NULL, MOE_OK, "weight=sparsemixer sparsemixer_eps=0.02"},
    {qwen3, NULL, NULL, NULL, AT, NULL, MOE_ERR_UNSUPPORTED, "the tensors fit qwen3_moe and olmoe"},
    {fused, NULL, NULL, NULL, AT, NULL, MOE_ERR_UNSUPPORTED, "set preset"},
    {fused, NULL, NULL, NULL, AT, "mixtral", MOE_OK, "top_k=2 weight=softmax d_ff=3"},
    {qwen3, NULL, NULL, "{\"num_experts_per_tok\":2,\"norm_topk_prob\":true}", AT, NULL, MOE_OK, "top_k=2 weight=sum"},
    {qwen3, NULL, NULL, "{\"num_experts_per_tok\":2,\"norm_topk_prob\":false}", AT, NULL, MOE_OK, "top_k=2 weight=raw"},
    {fused, NULL, NULL, "{\"num_experts_per_tok\":2,\"norm_topk_prob\":false}", AT, NULL, MOE_OK, "top_k=2 weight=raw"},
    {qwen3, NULL, NULL, "{\"model_type\":\"qwen3_moe\",\"num_experts_per_tok\":2}", AT, NULL, MOE_OK, "weight=raw"},
    {qwen3, NULL, NULL, "{\"num_experts_per_tok\":2}", AT, "qwen3_moe", MOE_OK, "weight=sum"},
    {qwen3, NULL, NULL, "{\"model_type\":\"olmoe\",\"num_experts_per_tok\":1,\"hidden_act\":\"swish\"}", AT,
     "qwen3_moe", MOE_ERR_CONFIG, "preset = qwen3_moe contradicts config.json: model_type = 'olmoe'"},
    {qwen3, NULL, NULL, "{\"model_type\":\"mine\",\"num_experts_per_tok\":1,\"hidden_act\":\"swish\"}", AT,
     "qwen3_moe", MOE_OK, "weight=sum top_k=1"},
    {qwen3, NULL, NULL, "{\"num_experts_per_tok\":2,\"norm_topk_prob\":false}", AT, "qwen3_moe", MOE_ERR_CONFIG,
     "has weight = sum, but config.json says raw; \"qwen3_moe weight=raw\""},
    {qwen3, NULL, NULL, "{\"num_experts_per_tok\":2,\"norm_topk_prob\":false}", AT, "qwen3_moe weight=raw", MOE_OK,
     "weight=raw top_k=2"},
    {qwen3, NULL, NULL, NULL, AT, "  qwen3_moe", MOE_ERR_NOT_FOUND, "preset = : unknown"},
    {qwen3, NULL, NULL, NULL, AT, "qwen3_moe  top_k=2 gate=sigmoid scale=1.5", MOE_OK,
     "top_k=2 gate=sigmoid scale=1.5"},
    {qwen3, NULL, NULL, NULL, AT, "qwen3_moe top_k=2 n_experts=5", MOE_ERR_CONFIG,
     "number of experts = 5, but the tensors have"},
    {qwen3, NULL, NULL, NULL, AT, "qwen3_moe top_k=2 expert_bias=1", MOE_ERR_CONFIG,
     "preset: expert_bias = 1, but by the file's settings and tensors it is 0"},
    {qwen3, NULL, NULL, NULL, AT, "qwen3_moe top_x=2", MOE_ERR_NOT_FOUND, "top_x: unknown field"},
    {qwen3, NULL, NULL, "{\"num_experts_per_tok\":2}", AT, "qwen3_moe top_k=1", MOE_ERR_CONFIG, "preset: top_k = 1"},
    {qwen3, NULL, NULL, "{\"model_type\":\"qwen3_moe\",\"num_experts_per_tok\":2}", AT, "weight=sum scale=2", MOE_OK,
     "weight=sum top_k=2 scale=2"},
    {qwen3, NULL, NULL, "{\"model_type\":\"olmoe\",\"num_experts_per_tok\":null, \"num_experts_per_tok\" : 3 }", AT,
     NULL, MOE_OK, "weight=raw top_k=3"},
    {qwen3, NULL, NULL, NULL, AT, "qwen3_moe", MOE_ERR_CONFIG, "qwen3_moe, top_k = 8"},
    {qwen3, shared_experts, NULL, "{\"num_experts_per_tok\":2,\"n_group\":2,\"topk_group\":1}", AT, NULL, MOE_OK,
     "select=grouped_top_k groups=2 groups_kept=1 scale=16 n_shared=1 d_shared=6"},
    {qwen3, shared_experts, NULL,
     "{\"model_type\":\"deepseek_v2\",\"num_experts_per_tok\":2,\"n_group\":2,\"topk_group\":1,\"n_shared_experts\":2}",
     AT, NULL, MOE_OK, "select=top_k groups=1 groups_kept=1 scale=1 n_shared=2 d_shared=3"},
    {qwen3, NULL, NULL, "{\"model_type\":\"deepseek_v2\",\"num_experts_per_tok\":2,\"n_shared_experts\":null}", AT,
     NULL, MOE_OK, "n_shared=0"},
    {qwen3, NULL, NULL, "{\"model_type\":\"deepseek_v2\",\"num_experts_per_tok\":2,\"n_shared_experts\":1}", AT, NULL,
     MOE_ERR_NOT_FOUND, "'model.layers.3.mlp.shared_experts.gate_proj.weight': missing"},
    {qwen3, NULL, NULL,
     "{\"model_type\":\"deepseek_v2\",\"num_experts_per_tok\":2,\"norm_topk_prob\":true,\"routed_scaling_factor\":16}",
     AT, NULL, MOE_OK, "weight=sum scale=1"},
    {qwen3, correction, NULL,
     "{\"model_type\":\"deepseek_v3\",\"num_experts_per_tok\":2,\"n_group\":2,\"topk_group\":2,\"scoring_func\":"
     "\"softmax\"}",
     AT, NULL, MOE_OK, "gate=softmax selection_bias=1 select=grouped_top_k group_score=top2_sum scale=2.5 weight=sum"},
    {qwen3, correction, NULL, "{\"model_type\":\"glm4_moe\",\"num_experts_per_tok\":2,\"n_group\":0}", AT, NULL, MOE_OK,
     "gate=sigmoid select=top_k scale=1 weight=sum"},
    {qwen3, correction, NULL, "{\"model_type\":\"glm4_moe\",\"num_experts_per_tok\":2,\"n_group\":1,\"topk_group\":1}",
     AT, NULL, MOE_OK, "select=top_k groups=1"},
    {qwen3, NULL, NULL, "{\"model_type\":\"deepseek_v3\",\"num_experts_per_tok\":2}", AT, NULL, MOE_ERR_NOT_FOUND,
     "gate.e_score_correction_bias': missing"},
    {llama4, NULL, NULL, NULL, AT, NULL, MOE_OK, "top_k=1 gate=sigmoid apply_to=input n_shared=1 d_shared=5 d_ff=3"},
    {llama4, NULL, NULL,
     "{\"model_type\":\"llama4\",\"num_experts_per_tok\":9,\"text_config\":{\"num_experts_per_tok\":2,\"model_type\":"
     "\"llama4_text\"}}",
     AT, NULL, MOE_OK, "top_k=2"},
    {gpt_oss, NULL, NULL, NULL, AT, NULL, MOE_OK,
     "top_k=4 router_bias=1 expert_bias=1 swiglu_alpha=1.702 swiglu_limit=7 swiglu_offset=1"},
    {gpt_oss, NULL, NULL, "{\"model_type\":\"gpt_oss\",\"experts_per_token\":2,\"swiglu_limit\":5.5}", AT, NULL, MOE_OK,
     "top_k=2 swiglu_limit=5.5"},
    {gpt_oss, NULL, NULL, "{\"model_type\":\"gpt_oss\",\"experts_per_token\":2,\"num_experts_per_tok\":1,"
     "\"swiglu_alpha\":1.5}", AT, NULL, MOE_OK, "top_k=1 swiglu_limit=7 swiglu_alpha=1.5"},

    {mixtral, NULL, NULL, NULL, "model.layers.9.mlp", NULL, MOE_ERR_NOT_FOUND,
     "no router at 'model.layers.9.mlp'; the MoE layers of the file (1): model.layers.3.mlp"},
    {mixtral, "/model.layers.4.mlp.gate.weight:F32:2,2 /model.layers.5.moe.gate.weight:F32:2,2", NULL, NULL, "x", NULL,
     MOE_ERR_NOT_FOUND, "(3): model.layers.3.mlp ... model.layers.5.moe"},
    {mixtral, "/model.layers.4.mlp.gate.weight:F32:2,2", NULL, NULL, "x", NULL, MOE_ERR_NOT_FOUND,
     "(2): model.layers.3.mlp, model.layers.4.mlp"},
    {mixtral, "/model.layers.0.mlp.up_proj.weight:F32:2,2", NULL, NULL, "model.layers.0.mlp", NULL, MOE_ERR_NOT_FOUND,
     "'model.layers.0.mlp' is a dense layer"},
    {mixtral, "/model.layers.0.mlp.up_proj.weight:F32:2,2", "gate.weight", NULL, "model.layers.0", NULL,
     MOE_ERR_NOT_FOUND, "'model.layers.0' is a dense layer"},
    {mixtral, "/model.layers.0.mlp.up_proj.weight:F32:2,2", NULL, NULL, "model.layers.0.mlp", NULL, MOE_ERR_NOT_FOUND,
     "MoE layers: 1, model.layers.3.mlp"},
    {mixtral,
     "/model.layers.0.mlp.up_proj.weight:F32:2,2 /model.layers.4.mlp.gate.weight:F32:2,2 "
     "/model.layers.5.mlp.gate.weight:F32:2,2",
     NULL, NULL, "model.layers.0", NULL, MOE_ERR_NOT_FOUND, "MoE layers: 3, model.layers.3.mlp to model.layers.5.mlp"},
    {mixtral, NULL, "gate.weight", NULL, AT, NULL, MOE_ERR_NOT_FOUND, "has no MoE layer"},
    {mixtral, NULL, NULL, NULL, "", NULL, MOE_ERR_NOT_FOUND, "no router at ''"},
    {mixtral, NULL, NULL, NULL, "...", NULL, MOE_ERR_NOT_FOUND, "no router at '...'"},
    {mixtral, NULL, NULL, NULL, "mlp", NULL, MOE_ERR_NOT_FOUND, "no router at 'mlp'"},
    {mixtral, NULL, NULL, NULL, AT, "nothing such", MOE_ERR_NOT_FOUND, "preset = nothing: unknown"},
    {mixtral, NULL, "experts.2.w3.weight", NULL, AT, NULL, MOE_ERR_NOT_FOUND,
     "'model.layers.3.mlp.experts.2.w3.weight': missing in the file"},
    {fused, NULL, "experts.down_proj", NULL, AT, "mixtral", MOE_ERR_NOT_FOUND,
     "'model.layers.3.mlp.experts.down_proj': missing"},
    {mixtral, NULL, "experts.0.w1.weight experts.1.w1.weight experts.2.w1.weight experts.3.w1.weight", NULL, AT,
     "mixtral", MOE_ERR_NOT_FOUND, "experts.0.w1.weight': missing"},
    {mixtral, "experts.gate_up_proj:F32:4,6,6", NULL, NULL, AT, "mixtral", MOE_ERR_FORMAT, "duplicates another tensor"},
    {mixtral, "experts.4.w1.weight:F32:3,6", NULL, NULL, AT, NULL, MOE_ERR_SHAPE,
     "experts.4.w1.weight': the router has only 4 experts"},
    {mixtral, "experts.01.w1.weight:F32:3,6", NULL, NULL, AT, NULL, MOE_ERR_UNSUPPORTED,
     "experts.01.w1.weight': no known family has a tensor"},
    {mixtral, "experts.1000000.w1.weight:F32:3,6", NULL, NULL, AT, "mixtral", MOE_ERR_UNSUPPORTED,
     "mixtral has no tensor of this name"},
    {mixtral, "experts..w1.weight:F32:3,6", NULL, NULL, AT, "mixtral", MOE_ERR_UNSUPPORTED,
     "mixtral has no tensor of this name"},
    {mixtral, "gat\xc3\xa9:F32:4,6", NULL, NULL, AT, "mixtral", MOE_ERR_UNSUPPORTED,
     "'model.layers.3.mlp.gat\xc3\xa9': mixtral has no tensor of this name"},
    {mixtral, "experts.1.w1.weight:F32:6,3", NULL, NULL, AT, NULL, MOE_ERR_SHAPE,
     "experts.1.w1.weight': the shape must be [3,6], it is [6,3]"},
    {mixtral, "experts.2.w2.weight:F32:18", NULL, NULL, AT, NULL, MOE_ERR_SHAPE, "must be [6,3], it is [18]"},
    {mixtral, "gate.weight:F32:4,6,1", NULL, NULL, AT, NULL, MOE_ERR_SHAPE, "gate.weight': the shape must be [0,0]"},
    {mixtral, "gate.weight:F32:0,6", NULL, NULL, AT, NULL, MOE_ERR_SHAPE, "it is [0,6]"},
    {fused, "experts.gate_up_proj:F32:4,5,6", NULL, NULL, AT, "olmoe", MOE_ERR_SHAPE, "must be [4,4,6], it is [4,5,6]"},
    {fused, "experts.down_proj:F32:4,3,6", NULL, NULL, AT, "olmoe", MOE_ERR_SHAPE, "must be [4,6,3], it is [4,3,6]"},
    {mixtral, "experts.1.w1.weight:I16:3,6", NULL, NULL, AT, NULL, MOE_ERR_UNSUPPORTED, "dtype I16 is not supported"},
    {mixtral, "experts.1.w1.weight:F8_E4M3:3,6", NULL, NULL, AT, NULL, MOE_ERR_UNSUPPORTED, "dtype (unknown)"},
    {mixtral, "/elsewhere:F8_E5M2:3,6", NULL, NULL, AT, NULL, MOE_OK, "top_k=2"},
    {mixtral, "experts.1.w1.weight_scale_inv:F32:1", NULL, NULL, AT, NULL, MOE_ERR_SHAPE, "not F8_E4M3 with"},
    {gpt_oss, "experts.gate_up_proj_blocks:U8:4", NULL, NULL, AT, NULL, MOE_ERR_UNSUPPORTED, "dtype U8"},
    {mixtral, "experts.1.something:F32:1", NULL, NULL, AT, NULL, MOE_ERR_UNSUPPORTED,
     "experts.1.something': no known family has a tensor of this name"},
    {mixtral, "router.bias:F32:4", NULL, NULL, AT, NULL, MOE_ERR_UNSUPPORTED,
     "no family has this combination of tensors"},
    {mixtral, NULL, NULL, NULL, AT, "switch", MOE_ERR_CONFIG,
     "the settings need a parameter 'experts.fc1.weight', but mixtral has no tensor for it"},
    {mixtral, NULL, NULL, NULL, AT, "norm_routing", MOE_ERR_UNSUPPORTED,
     "gate.weight': a layer with these settings has no such tensor"},
    {gpt_oss, NULL, "experts.down_proj_bias", NULL, AT, NULL, MOE_ERR_NOT_FOUND,
     "experts.down_proj_bias': missing in the file"},
    {gpt_oss, NULL, "experts.gate_up_proj_bias", NULL, AT, NULL, MOE_ERR_NOT_FOUND,
     "experts.gate_up_proj_bias': missing in the file"},
    {gpt_oss, NULL, "experts.gate_up_proj_bias experts.down_proj_bias", NULL, AT, NULL, MOE_OK, "expert_bias=0"},
    {gpt_oss, NULL, "router.bias", "{\"model_type\":\"gpt_oss\"}", AT, NULL, MOE_ERR_NOT_FOUND,
     "router.bias': missing in the file; gpt_oss needs it"},

    {mixtral, NULL, NULL, "{\"model_type\":\"mixtral\",\"hidden_act\":\"gelu\"}", AT, NULL, MOE_ERR_UNSUPPORTED,
     "config.json: hidden_act = gelu is not supported"},
    {mixtral, NULL, NULL, "{\"model_type\":\"mixtral\",\"hidden_act\":[1]}", AT, NULL, MOE_ERR_UNSUPPORTED,
     "hidden_act = a list"},
    {mixtral, NULL, NULL, "{\"model_type\":\"mixtral\",\"quantization_config\":{\"quant_method\":\"gptq\"}}", AT, NULL,
     MOE_ERR_UNSUPPORTED, "quantization_config"},
    {mixtral, NULL, NULL, "{\"quantization_config\":null}", AT, NULL, MOE_OK, "top_k=2"},
    {mixtral, NULL, NULL, "{\"model_type\":\"something\"}", AT, NULL, MOE_ERR_UNSUPPORTED,
     "model_type = 'something': unknown family"},
    {mixtral, NULL, NULL, "{\"model_type\":\"something\"}", AT, "mixtral", MOE_OK, "top_k=2"},
    {mixtral, NULL, NULL, "{\"model_type\":\"qwen3_moe\"}", AT, NULL, MOE_ERR_UNSUPPORTED,
     "qwen3_moe has no tensor of this name"},
    {mixtral, NULL, NULL, "{\"num_experts_per_tok\":\"2\"}", AT, NULL, MOE_ERR_CONFIG,
     "num_experts_per_tok = 2: expected a number"},
    {mixtral, NULL, NULL, "{\"num_experts_per_tok\":2.5}", AT, NULL, MOE_ERR_CONFIG,
     "num_experts_per_tok = 2.5: expected a number"},
    {mixtral, NULL, NULL, "{\"num_experts_per_tok\":0}", AT, NULL, MOE_ERR_CONFIG, "other than 0"},
    {mixtral, NULL, NULL, "{\"num_experts_per_tok\":-1}", AT, NULL, MOE_ERR_CONFIG, "top_k"},
    {mixtral, NULL, NULL, "{\"num_experts_per_tok\":5}", AT, NULL, MOE_ERR_CONFIG, "mixtral, top_k = 5"},
    {mixtral, NULL, NULL, "{\"num_experts_per_tok\":[2]}", AT, NULL, MOE_ERR_CONFIG, "expected a number"},
    {mixtral, NULL, NULL,
     "{\"num_experts_per_tok\":00000000000000000000000000000000000000000000000000000000000000000000000000}", AT, NULL,
     MOE_ERR_FORMAT, "a value is expected"},
    {mixtral, NULL, NULL,
     "{\"num_experts_per_tok\":1.00000000000000000000000000000000000000000000000000000000000000000000000}", AT, NULL,
     MOE_ERR_CONFIG, "expected a number"},
    {mixtral, NULL, NULL, "{\"num_local_experts\":8}", AT, NULL, MOE_ERR_CONFIG,
     "number of experts = 8, but the tensors have 4"},
    {mixtral, NULL, NULL, "{\"num_local_experts\":0}", AT, NULL, MOE_ERR_CONFIG, "num_local_experts = 0"},
    {mixtral, NULL, NULL, "{\"num_experts\":0}", AT, NULL, MOE_ERR_CONFIG, "num_experts = 0"},
    {qwen3, NULL, NULL, "{\"model_type\":\"deepseek_v2\",\"num_experts_per_tok\":2,\"n_routed_experts\":0}", AT, NULL,
     MOE_ERR_CONFIG, "n_routed_experts = 0"},
    {mixtral, NULL, NULL, "{\"hidden_size\":0}", AT, NULL, MOE_ERR_CONFIG, "hidden_size = 0"},
    {mixtral, NULL, NULL, "{\"moe_intermediate_size\":0}", AT, NULL, MOE_ERR_CONFIG, "moe_intermediate_size = 0"},
    {mixtral, NULL, NULL, "{\"hidden_size\":8}", AT, NULL, MOE_ERR_CONFIG, "hidden_size = 8, but the tensors have 6"},
    {mixtral, NULL, NULL, "{\"moe_intermediate_size\":8}", AT, NULL, MOE_ERR_CONFIG,
     "moe_intermediate_size = 8, but the tensors have 3"},
    {qwen3, NULL, NULL, "{\"model_type\":\"olmoe\",\"norm_topk_prob\":1}", AT, NULL, MOE_ERR_UNSUPPORTED,
     "norm_topk_prob = 1 is not supported for olmoe"},
    {qwen3, correction, NULL, "{\"model_type\":\"deepseek_v3\",\"topk_method\":\"other\"}", AT, NULL,
     MOE_ERR_UNSUPPORTED, "topk_method = other"},
    {qwen3, correction, NULL,
     "{\"model_type\":\"deepseek_v3\",\"num_experts_per_tok\":1,\"n_group\":3,\"topk_group\":1}", AT, NULL,
     MOE_ERR_CONFIG, "groups = 3"},
    {qwen3, correction, NULL, "{\"model_type\":\"deepseek_v3\",\"routed_scaling_factor\":0}", AT, NULL, MOE_ERR_CONFIG,
     "other than 0"},
    {mixtral, NULL, NULL, "", AT, NULL, MOE_ERR_FORMAT, "config.json, byte 0: not a JSON object"},
    {mixtral, NULL, NULL, "[]", AT, NULL, MOE_ERR_FORMAT, "not a JSON object"},
    {mixtral, NULL, NULL, "{\"a\":1} x", AT, NULL, MOE_ERR_FORMAT, "unexpected text after"},
    {mixtral, NULL, NULL, "{\"a\":tru}", AT, NULL, MOE_ERR_FORMAT, "a value is expected"},
    {mixtral, NULL, NULL, "{\"a\":[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}", AT, NULL, MOE_ERR_UNSUPPORTED,
     "levels of nesting"},
    {mixtral, NULL, NULL, "{\"text_config\":3,\"num_experts_per_tok\":1}", AT, NULL, MOE_OK, "top_k=1"}};

static void of_rows(void) {
    static text file, config;
    moe_import_source sources[2];
    moe_layer layer;
    moe_error error;
    size_t i;
    char says[400];
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const row *r = &rows[i];
        moe_status status;
        make_file(&file, AT, r->list, r->more, r->without);
        config.n = 0;
        put_text(&config, r->config != NULL ? r->config : "");
        sources[0] = source(NULL, &file);
        sources[1] = source("config.json", &config);
        status = try_read(&layer, sources, r->config != NULL ? 2 : 1, r->prefix, r->preset, &error);
        sprintf(says, "row %lu: %s: %.250s, wanted: %.90s", (unsigned long)i, moe_status_text(status),
                status != MOE_OK ? error.message : "", r->says);
        if (!CHECK(status == r->status, says)) continue;
        if (status == MOE_OK) {
            CHECK(has_settings(&layer.config, r->says), says);
            moe_layer_free(&layer);
        } else CHECK(strstr(error.message, r->says) != NULL, says);
    }
}

/* ---- memory that fails ---- */

/* Fills what the next call finds on the stack. */
static int litter(int depth) {
    volatile char room[4096];
    size_t i;
    for (i = 0; i < sizeof room; i++) room[i] = '~';
    return depth > 0 ? litter(depth - 1) + room[depth] : room[0];
}

/* Whichever allocation fails, the error says that memory is missing. */
static void of_no_memory(const moe_import_source *sources, size_t n, const char *prefix) {
    moe_allocator allocator;
    moe_layer layer;
    moe_error error;
    moe_status status = MOE_ERR_MEMORY;
    test_heap h;
    long at;
    allocator = test_allocator(&h, 0);
    for (at = 1; at < 200 && status == MOE_ERR_MEMORY; at++) {
        h.calls = 0;
        h.fail_at = at;
        (void)litter(16);
        status = moe_import_read(&layer, sources, n, prefix, NULL, &allocator, &error);
        if (status == MOE_OK) break;
        CHECK(status == MOE_ERR_MEMORY && strstr(error.message, "memory") != NULL && strchr(error.message, '~') == NULL,
              error.message);
        CHECK(h.blocks == 0);
    }
    CHECK(status == MOE_OK && at > 3);
    if (status == MOE_OK) moe_layer_free(&layer);
    CHECK(h.blocks == 0);
}

/* ---- indexes ---- */

static void index_says(const moe_import_source *sources, size_t n, const char *prefix, moe_status wanted,
                       const char *says, int line) {
    moe_layer layer;
    moe_error error;
    char shown[400];
    moe_status status = try_read(&layer, sources, n, prefix, NULL, &error);
    sprintf(shown, "%s: %.250s", moe_status_text(status), status != MOE_OK ? error.message : "");
    CHECK_AT(line, status == wanted && (status == MOE_OK || strstr(error.message, says) != NULL), says);
    if (status == MOE_OK) moe_layer_free(&layer);
}

#define INDEX(sources, n, wanted, says) index_says(sources, n, AT, wanted, says, __LINE__)

static void put_map(text *t, const char *a, const char *list_a, const char *b, const char *list_b, const char *more) {
    const char *files[2], *lists[2];
    int i, expert, first = 1;
    files[0] = a;
    files[1] = b;
    lists[0] = list_a;
    lists[1] = list_b;
    t->n = 0;
    put_text(t, "{\"metadata\":{},\"weight_map\":{");
    for (i = 0; i < 2; i++) {
        const char *p = lists[i];
        while (*p != '\0') {
            const size_t length = strcspn(p, " ");
            for (expert = 0; expert < (memchr(p, '%', length) != NULL ? 4 : 1); expert++) {
                char line[400];
                entry e;
                entry_of(&e, p, length, AT, expert);
                sprintf(line, "%s\"%s\":\"%s\"", first ? "" : ",", e.name, files[i]);
                put_text(t, line);
                first = 0;
            }
            p += length;
            p += strspn(p, " ");
        }
    }
    put_text(t, more);
    put_text(t, "}}");
}

/* A file whose header lies. */
static void lying_headers(text *a, moe_import_source *sources) {
    make_file(a, AT, mixtral, NULL, NULL);
    a->p[0] = (char)(a->p[0] + 1);
    sources[0] = source("a", a);
    INDEX(sources, 1, MOE_ERR_FORMAT, "a, ");
    a->p[6] = 1;
    sources[0] = source("a", a);
    INDEX(sources, 1, MOE_ERR_FORMAT, "more than 100000000");
    a->p[6] = 0;
    a->p[1] = 0x40;
    a->p[2] = 2;
    sources[0] = source("a", a);
    INDEX(sources, 1, MOE_ERR_FORMAT, "too many bytes");
    memset(a->p, 0, 8);
    sources[0] = source("a", a);
    INDEX(sources, 1, MOE_ERR_FORMAT, "no bytes");
}

static void other_indexes(moe_import_source *sources, size_t n) {
    static text map;
    map.n = 0;
    put_text(&map, "{\"weight_map\":[]}");
    sources[0] = source("index", &map);
    INDEX(sources, n, MOE_ERR_FORMAT, "no object 'weight_map'");
    map.n = 0;
    put_text(&map, " {\"metadata\":{}}");
    sources[0] = source("index", &map);
    INDEX(sources, n, MOE_ERR_FORMAT, "no object 'weight_map'");
    map.n = 0;
    put_text(&map, "\n{\"weight_map\":{}");
    sources[0] = source("index", &map);
    INDEX(sources, n, MOE_ERR_FORMAT, "index, byte");
    map.n = 0;
    put_text(&map, "\r\n[1]");
    sources[0] = source("index", &map);
    INDEX(sources, n, MOE_ERR_FORMAT, "not a JSON object");
    map.n = 0;
    put_text(&map, "neither");
    sources[0] = source("index", &map);
    INDEX(sources, n, MOE_ERR_FORMAT, "not a safetensors file, an index");
    map.n = 0;
    sources[0] = source("index", &map);
    INDEX(sources, n, MOE_ERR_FORMAT, "not a safetensors file, an index");
}

static void of_indexes(void) {
    static const char part_a[] = "gate.weight:F32:4,6 experts.%.w1.weight:F32:3,6";
    static const char part_b[] = "experts.%.w3.weight:F16:3,6 experts.%.w2.weight:BF16:6,3";
    static text map, a, b, c;
    static const char *const bad[] = {"../b.safetensors", "/b", "x/b", "c:b", "..\\b", "", ".hidden", "a\\u0001"};
    moe_import_source sources[4];
    size_t n = 3, i;
    make_file(&a, AT, part_a, NULL, NULL);
    make_file(&b, AT, part_b, NULL, NULL);
    put_map(&map, "a.safetensors", part_a, "b.safetensors", part_b, ",\"other\":\"none.safetensors\",\"odd\":[3]");
    sources[0] = source("model.safetensors.index.json", &map);
    sources[1] = source("a.safetensors", &a);
    sources[2] = source("b.safetensors", &b);
    INDEX(sources, n, MOE_OK, "");
    of_no_memory(sources, n, AT);
    index_says(sources, n, "model.layers.7", MOE_ERR_NOT_FOUND, "(1): model.layers.3.mlp", __LINE__);
    n = 2;
    INDEX(sources, n, MOE_ERR_NOT_FOUND, "the file 'b.safetensors', which holds 'experts.0.w3.weight', is missing");
    n = 3;
    put_map(&map, "a.safetensors", part_a, "b.safetensors", part_b, ",\"" AT ".odd\":\"a.safetensors\"");
    sources[0] = source("index", &map);
    INDEX(sources, n, MOE_ERR_NOT_FOUND, "the index lists it in 'a.safetensors', which does not have it");
    put_map(&map, "a.safetensors", part_a, "b.safetensors", part_b,
            ",\"" AT ".experts.9.w1.weight\":\"a.safetensors\"");
    sources[0] = source("index", &map);
    INDEX(sources, n, MOE_ERR_NOT_FOUND, "which does not have it");
    put_map(&map, "a.safetensors", part_a, "b.safetensors", part_b, ",\"" AT ".experts.3.w2.weight\":3");
    sources[0] = source("index", &map);
    INDEX(sources, n, MOE_ERR_FORMAT, "is named ''");
    make_file(&b, AT, part_b, NULL, "experts.3.w2.weight");
    put_map(&map, "a.safetensors", part_a, "b.safetensors", part_b, "");
    sources[0] = source("index", &map);
    sources[2] = source("b.safetensors", &b);
    INDEX(sources, n, MOE_ERR_NOT_FOUND,
          "experts.3.w2.weight': the index lists it in 'b.safetensors', which does not have it");
    make_file(&b, AT, part_b, part_a, NULL);
    sources[2] = source("b.safetensors", &b);
    INDEX(sources, n, MOE_ERR_FORMAT, "duplicates another tensor");
    make_file(&b, AT, part_b, NULL, NULL);
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        put_map(&map, "a.safetensors", part_a, bad[i], part_b, "");
        sources[0] = source("index", &map);
        sources[2] = source(bad[i], &b);
        INDEX(sources, n, MOE_ERR_FORMAT, "must be a plain name in the same folder");
    }
    put_map(&map, "a.safetensors", part_a, "config.json", part_b, "");
    c.n = 0;
    put_text(&c, "{\"model_type\":\"mixtral\"}");
    sources[0] = source("index", &map);
    sources[2] = source("config.json", &c);
    INDEX(sources, n, MOE_ERR_NOT_FOUND, "the index lists it in 'config.json'");
    put_map(&map, "a.safetensors", part_a, "index", part_b, "");
    sources[0] = source("index", &map);
    INDEX(sources, n, MOE_ERR_FORMAT, "not a safetensors file");
    other_indexes(sources, n);
    lying_headers(&a, sources);
}

/* ---- GGUF ---- */

static void gguf_string(text *t, const char *s) {
    put_number(t, strlen(s), 8);
    put_text(t, s);
}

static void gguf_key(text *t, const char *key, int type) {
    gguf_string(t, key);
    put_number(t, (uint64_t)type, 4);
}

typedef struct gguf {
    const char *arch;    /* NULL: none */
    int version, n_kv;   /* n_kv: keys in kv */
    const text *kv;
    const char *tensors; /* "name:type:ne" */
    uint64_t n_tensors;  /* 0: as many as there are */
    uint64_t offset;     /* added to the last tensor's */
} gguf;

/* The bytes of so many elements. */
static size_t gguf_bytes(long type, size_t count) {
    switch (type) {
    case 0: return count * 4;
    case 2: return count / 32 * 18;
    case 8: return count / 32 * 34;
    case 28: return count * 8;
    default: return count * 2;
    }
}

static void make_gguf(text *file, const gguf *g) {
    static text infos, data;
    const char *p = g->tensors;
    uint64_t n = 0;
    infos.n = data.n = file->n = 0;
    while (*p != '\0') {
        char name[100];
        size_t length = strcspn(p, ":"), count = 1, at;
        unsigned dims = 0;
        long type;
        char *end;
        memcpy(name, p, length);
        name[length] = '\0';
        type = strtol(p + length + 1, &end, 10);
        gguf_string(&infos, name);
        at = infos.n;
        put_number(&infos, 0, 4);
        for (p = end; *p == ':' || *p == ','; dims++) {
            const unsigned long ne = strtoul(p + 1, &end, 10);
            put_number(&infos, ne, 8);
            count *= ne;
            p = end;
        }
        infos.p[at] = (char)dims;
        put_number(&infos, (uint64_t)type, 4);
        p += strspn(p, " ");
        put_number(&infos, data.n + (*p == '\0' ? g->offset : 0), 8);
        if (count < MOST / 8)
            for (at = data.n + gguf_bytes(type, count); data.n < at || data.n % 32 != 0;)
                put_number(&data, data.n % 4 == 3 ? 0x3e : data.n * 7 % 32, 1);
        n++;
    }
    put_text(file, "GGUF");
    put_number(file, (uint64_t)g->version, 4);
    put_number(file, g->n_tensors > 0 ? g->n_tensors : n, 8);
    put_number(file, (uint64_t)(g->n_kv + (g->arch != NULL)), 8);
    if (g->kv != NULL) put(file, g->kv->p, g->kv->n);
    if (g->arch != NULL) {
        gguf_key(file, "general.architecture", 8);
        gguf_string(file, g->arch);
    }
    put(file, infos.p, infos.n);
    while (file->n % 32 != 0) put_number(file, 0, 1);
    put(file, data.p, data.n);
}

static const char gguf_mixtral[] = "blk.3.ffn_gate_inp.weight:0:32,4 blk.3.ffn_gate_exps.weight:8:32,32,4 "
                                   "blk.3.ffn_up_exps.weight:2:32,32,4 blk.3.ffn_down_exps.weight:1:32,32,4";

static void gguf_says(const gguf *g, const char *prefix, const char *preset, moe_status wanted, const char *says,
                      int line) {
    static text file;
    moe_import_source s;
    moe_layer layer;
    moe_error error;
    char shown[400];
    moe_status status;
    make_gguf(&file, g);
    s = source("model.gguf", &file);
    status = try_read(&layer, &s, 1, prefix, preset, &error);
    sprintf(shown, "%s: %.250s", moe_status_text(status), status != MOE_OK ? error.message : "");
    if (!CHECK_AT(line, status == wanted && (status == MOE_OK || strstr(error.message, says) != NULL), says) ||
        status != MOE_OK)
        return;
    CHECK_AT(line, has_settings(&layer.config, says), says);
    moe_layer_free(&layer);
}

#define GGUF(g, wanted, says) gguf_says(g, "blk.3", NULL, wanted, says, __LINE__)

static void gguf_number(text *kv, const char *key, uint32_t value) {
    gguf_key(kv, key, 4);
    put_number(kv, value, 4);
}

static void refuse_gguf(gguf *g) {
    g->arch = "other";
    GGUF(g, MOE_ERR_UNSUPPORTED, "general.architecture = 'other'");
    gguf_says(g, "blk.3", "mixtral", MOE_OK, "top_k=2", __LINE__);
    g->arch = "\xc3\xa9\xff\x1b\x7f\xc3"; /* a message is UTF-8 that can be shown */
    GGUF(g, MOE_ERR_UNSUPPORTED, "general.architecture = '\xc3\xa9\?\?\?\?': unknown family");
    g->arch = NULL;
    GGUF(g, MOE_ERR_UNSUPPORTED, "general.architecture = ''");
    g->arch = "llama";
    g->version = 1;
    GGUF(g, MOE_ERR_UNSUPPORTED, "GGUF version 1 is not supported; versions 2 and 3, little-endian");
    g->version = 0x03000000;
    GGUF(g, MOE_ERR_UNSUPPORTED, "GGUF version 50331648");
    g->version = 2;
    g->n_tensors = 70000;
    GGUF(g, MOE_ERR_UNSUPPORTED, "too many tensors");
    g->n_tensors = 400;
    GGUF(g, MOE_ERR_FORMAT, "model.gguf: byte");
    g->n_tensors = 0;
    g->offset = 1 << 20;
    GGUF(g, MOE_ERR_FORMAT, "a tensor starts beyond the end");
    g->offset = (uint64_t)0 - 32; /* one block of memory must not make two tensors */
    GGUF(g, MOE_ERR_FORMAT, "a tensor overlaps the one before it");
    g->offset = (uint64_t)0 - (1 << 20);
    GGUF(g, MOE_ERR_FORMAT, "a tensor starts beyond the end");
    g->offset = 32;
    GGUF(g, MOE_ERR_FORMAT, "blk.3.ffn_down_exps.weight': 8192 bytes at offset");
    g->offset = 0;
    g->tensors = "blk.3.ffn_gate_inp.weight:0:32,4 blk.3.ffn_gate_exps.weight:17:32,2,4";
    GGUF(g, MOE_ERR_UNSUPPORTED, "GGUF type IQ2_XS is not supported; F32");
    g->tensors = "blk.3.ffn_gate_inp.weight:0:32,4 blk.3.ffn_gate_exps.weight:77:32,2,4";
    GGUF(g, MOE_ERR_UNSUPPORTED, "GGUF type 77 is not supported");
    g->tensors = "blk.3.ffn_gate_inp.weight:0:32,4 blk.3.ffn_gate_exps.weight:8:16,2,4";
    GGUF(g, MOE_ERR_FORMAT, "not a multiple of its block size");
    g->tensors = "blk.3.ffn_gate_inp.weight:0:32,4 blk.3.ffn_gate_exps.weight:8:32,2,4,1,1";
    GGUF(g, MOE_ERR_FORMAT, "more than 4 dimensions");
    g->tensors = "x:0:4294967295,4294967295,4294967295";
    GGUF(g, MOE_ERR_OVERFLOW, "too many elements for size_t");
    g->tensors =
        "blk.3.ffn_gate_inp.weight:0:32,4 blk.3.ffn_gate_exps.weight:8:32,2,4 blk.3.ffn_gate_exps.weight:8:32,2,4";
    GGUF(g, MOE_ERR_FORMAT, "duplicates another tensor");
    g->tensors = "blk.3.ffn_gate_inp.weight:0:32,4 blk.3.ffn_gate_exps.weight:8:32,2,4";
    GGUF(g, MOE_ERR_NOT_FOUND, "'blk.3.ffn_up_exps.weight': missing");
    g->tensors = "blk.3.ffn_gate_inp.weight:0:32,4 blk.3.ffn_gate.0.weight:8:32,2";
    GGUF(g, MOE_ERR_NOT_FOUND, "'blk.3.ffn_gate.1.weight': missing");
    g->tensors = "blk.3.ffn_gate_inp.weight:0:32,4 blk.3.ffn_gate_chexps.weight:8:32,2,4";
    GGUF(g, MOE_ERR_UNSUPPORTED, "ffn_gate_chexps.weight': mixtral has no tensor");
    g->arch = "deepseek2";
    g->tensors = "blk.3.ffn_gate_inp.weight:0:32,4 blk.3.ffn_gate_tid2eid.weight:26:32,2,4";
    GGUF(g, MOE_ERR_UNSUPPORTED, "ffn_gate_tid2eid.weight': deepseek_v2 has no tensor");
    g->tensors = "blk.3.ffn_up.weight:0:32,4 blk.3.ffn_norm.weight:0:32";
    GGUF(g, MOE_ERR_NOT_FOUND, "'blk.3' is a dense layer");
}

static void refuse_gguf_metadata(text *kv, gguf *g) {
    int i;
    gguf_key(kv, "llama.expert_used_count", 1);
    put_number(kv, 0xff, 1);
    GGUF(g, MOE_ERR_CONFIG, "top_k = -1");
    kv->n = 0;
    gguf_number(kv, "llama.expert_count", 5);
    GGUF(g, MOE_ERR_CONFIG, "metadata: number of experts = 5, but the tensors have 4");
    kv->n = 0;
    gguf_number(kv, "general.alignment", 0);
    GGUF(g, MOE_ERR_FORMAT, "general.alignment must be 1 to 65536");
    kv->n = 0;
    gguf_number(kv, "general.alignment", 65537);
    GGUF(g, MOE_ERR_FORMAT, "general.alignment must be 1 to 65536");
    kv->n = 0;
    gguf_key(kv, "a", 13);
    GGUF(g, MOE_ERR_FORMAT, "unknown value type");
    kv->n = 0;
    gguf_key(kv, "llama.expert_used_count", 13);
    GGUF(g, MOE_ERR_FORMAT, "unknown value type");
    kv->n = 0;
    gguf_key(kv, "a", 8);
    put_number(kv, UINT64_MAX, 8);
    GGUF(g, MOE_ERR_FORMAT, "a string goes beyond");
    kv->n = 0;
    gguf_key(kv, "a", 9);
    put_number(kv, 10, 4);
    put_number(kv, UINT64_MAX / 8 + 1, 8);
    GGUF(g, MOE_ERR_FORMAT, "goes beyond the end");
    kv->n = 0;
    gguf_key(kv, "a", 9);
    put_number(kv, 77, 4);
    put_number(kv, 1, 8);
    GGUF(g, MOE_ERR_FORMAT, "unknown value type");
    kv->n = 0;
    gguf_key(kv, "a", 9);
    for (i = 0; i < 6; i++) {
        put_number(kv, 9, 4);
        put_number(kv, 1, 8);
    }
    GGUF(g, MOE_ERR_UNSUPPORTED, "nested too deeply");
    kv->n = 0;
    gguf_key(kv, "a", 9);
    put_number(kv, 8, 4);
    put_number(kv, 0, 8);
    GGUF(g, MOE_OK, "top_k=2");
    kv->n = 0;
    gguf_key(kv, "a", 9); /* two arrays of two texts: both end with the last one */
    put_number(kv, 9, 4);
    put_number(kv, 2, 8);
    for (i = 0; i < 4; i++) {
        if (i % 2 == 0) put_number(kv, 8, 4);
        if (i % 2 == 0) put_number(kv, 2, 8);
        put_number(kv, 1, 8);
        put_number(kv, 'x', 1);
    }
    GGUF(g, MOE_OK, "top_k=2");
}

/* Of equal keys the last one counts. */
static void of_equal_keys(void) {
    static text kv;
    gguf g;
    memset(&g, 0, sizeof g);
    g.arch = "llama";
    g.version = 3;
    g.tensors = gguf_mixtral;
    g.kv = &kv;
    g.n_kv = 2;
    gguf_number(&kv, "llama.expert_used_count", 3);
    gguf_number(&kv, "llama.expert_used_count", 1);
    GGUF(&g, MOE_OK, "top_k=1");
}

static void of_gguf(void) {
    static text kv;
    gguf g;
    int i;
    memset(&g, 0, sizeof g);
    g.arch = "llama";
    g.version = 3;
    g.tensors = gguf_mixtral;
    GGUF(&g, MOE_OK, "top_k=2 weight=softmax d_model=32 d_ff=32");
    gguf_says(&g, "blk.0", NULL, MOE_ERR_NOT_FOUND, "no router at 'blk.0'; the MoE layers of the file (1): blk.3",
              __LINE__);
    refuse_gguf(&g);
    /* metadata */
    g.tensors = gguf_mixtral;
    g.arch = "llama";
    g.kv = &kv;
    g.n_kv = 1;
    for (i = 0; i < 13; i++) { /* a K of each type */
        static const unsigned char sizes[13] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
        kv.n = 0;
        gguf_key(&kv, "llama.expert_used_count", i);
        if (i == 8) gguf_string(&kv, "3");
        else if (i == 9) {
            put_number(&kv, 4, 4);
            put_number(&kv, 1, 8);
            put_number(&kv, 3, 4);
        } else put_number(&kv, i == 6 ? 0x40400000 : i == 12 ? UINT64_C(0x4008000000000000) : 3, sizes[i]);
        if (i == 7) GGUF(&g, MOE_ERR_CONFIG, "metadata: expert_used_count = true");
        else if (i == 8) GGUF(&g, MOE_ERR_CONFIG, "metadata: expert_used_count = 3: expected a number");
        else if (i == 9) GGUF(&g, MOE_ERR_CONFIG, "metadata: expert_used_count = a list: expected a number");
        else GGUF(&g, MOE_OK, "top_k=3");
    }
    kv.n = 0;
    refuse_gguf_metadata(&kv, &g);
    g.arch = "minimax-m2";
    g.tensors = "blk.3.ffn_gate_inp.weight:0:32,4 blk.3.ffn_gate_exps.weight:30:32,2,4 "
                "blk.3.ffn_up_exps.weight:28:32,2,4 blk.3.ffn_down_exps.weight:0:2,32,4 blk.3.exp_probs_b.bias:0:4";
    g.n_kv = 2;
    kv.n = 0;
    gguf_number(&kv, "minimax-m2.expert_used_count", 2);
    gguf_number(&kv, "minimax-m2.expert_gating_func", 4);
    GGUF(&g, MOE_OK, "gate=sqrt_softplus selection_bias=1");
    kv.n = 0;
    gguf_number(&kv, "minimax-m2.expert_used_count", 2);
    gguf_number(&kv, "minimax-m2.expert_gating_func", 0);
    GGUF(&g, MOE_ERR_NOT_FOUND, "metadata: minimax-m2.expert_gating_func is missing; minimax_m2 needs it");
    gguf_says(&g, "blk.3", "minimax_m2", MOE_OK, "gate=sigmoid", __LINE__);
    kv.n = 0;
    gguf_number(&kv, "minimax-m2.expert_used_count", 2);
    gguf_number(&kv, "minimax-m2.expert_gating_func", 9);
    GGUF(&g, MOE_ERR_UNSUPPORTED, "expert_gating_func = 9 is not supported for minimax_m2");
    kv.n = 0;
    gguf_number(&kv, "minimax-m2.expert_used_count", 2);
    gguf_number(&kv, "minimax-m2x.expert_gating_func", 9);
    GGUF(&g, MOE_ERR_NOT_FOUND, "expert_gating_func is missing");
    gguf_says(&g, "blk.3", "minimax_m2", MOE_OK, "gate=sigmoid", __LINE__);
}

#define REFUSED(call, wanted, says) \
    do { \
        error.message[0] = '\0'; \
        CHECK((call) == (wanted), error.message); \
        CHECK(strstr(error.message, says) != NULL, error.message); \
    } while (0)

/* Of a list of settings, a layer takes the element of the last number in its prefix; a preset with
   the name of a family has the tensors of that family alone. */
static void of_prefixes(void) {
    static const char config[] = "{\"model_type\":\"mixtral\",\"num_experts_per_tok\":[2,3,1]}";
    static const char list[] = "router.layer.weight:F32:4,6 input_linear.weight:F32:4,6,6 "
                               "output_linear.weight:F32:4,6,3 ", more[] =
        "shared_mlp.input_linear.weight:F32:10,6 shared_mlp.output_linear.weight:F32:6,5";
    static text file;
    moe_import_source sources[2];
    moe_layer layer;
    moe_error error;
    make_file(&file, "parts.1.layers.2.mlp", mixtral, NULL, NULL);
    sources[0] = source(NULL, &file);
    sources[1] = moe_import_memory("config.json", config, sizeof config - 1);
    if (CHECK(moe_import_read(&layer, sources, 2, "parts.1.layers.2.mlp", NULL, NULL, &error) == MOE_OK,
              error.message)) {
        CHECK(layer.config.router.top_k == 1);
        moe_layer_free(&layer);
    }
    make_file(&file, AT, list, more, NULL);
    sources[0] = source(NULL, &file);
    REFUSED(moe_import_read(&layer, sources, 1, AT, "granite_moe top_k=2", NULL, &error), MOE_ERR_UNSUPPORTED,
            "granite_moe has no tensor of this name");
}

/* Parts that end early or are none. */
static void of_broken_parts(const text *files, const char *const *names) {
    moe_import_source s[3];
    moe_layer layer;
    moe_error error;
    s[0] = source(names[0], &files[0]);
    s[1] = source(names[2], &files[2]);
    s[2] = moe_import_memory(names[1], "no file", 7);
    REFUSED(moe_import_read(&layer, s, 3, "blk.3", NULL, NULL, &error), MOE_ERR_FORMAT,
            "m-00002-of-00003.gguf: not a GGUF file");
    s[2] = moe_import_memory(names[1], "GG", 2);
    REFUSED(moe_import_read(&layer, s, 3, "blk.3", NULL, NULL, &error), MOE_ERR_FORMAT,
            "m-00002-of-00003.gguf: the file ends before byte 4");
    s[2] = moe_import_memory(names[1], files[1].p, 40);
    REFUSED(moe_import_read(&layer, s, 3, "blk.3", NULL, NULL, &error), MOE_ERR_FORMAT, "m-00002-of-00003.gguf");
    s[1] = moe_import_memory(names[1], files[1].p, files[1].n); /* part 2, and part 1 ends early */
    s[2] = moe_import_memory(names[0], files[0].p, 40);
    REFUSED(moe_import_read(&layer, s + 1, 2, "blk.3", NULL, NULL, &error), MOE_ERR_FORMAT, "m-00001-of-00003.gguf");
}

/* A split file: only part 1 has the settings; the tensors lie in all parts. */
static void of_gguf_parts(void) {
    static text files[3], kv[3];
    static const char *const tensors[3] = {"token_embd.weight:0:32", "blk.3.ffn_gate_inp.weight:0:32,4 "
                                           "blk.3.ffn_gate_exps.weight:8:32,32,4",
                                           "blk.3.ffn_up_exps.weight:2:32,32,4 blk.3.ffn_down_exps.weight:1:32,32,4"};
    static const char *const names[4] = {"m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf",
                                         "model.gguf"};
    moe_import_source s[3], swapped;
    moe_layer layer;
    moe_error error;
    gguf g[3];
    int i;
    memset(g, 0, sizeof g);
    for (i = 0; i < 3; i++) {
        kv[i].n = 0;
        gguf_key(&kv[i], "split.no", 2);
        put_number(&kv[i], (uint64_t)i, 2);
        gguf_key(&kv[i], "split.count", 2);
        put_number(&kv[i], 3, 2);
        g[i].version = 3;
        g[i].n_kv = 2;
        if (i == 0) {
            g[i].arch = "llama";
            g[i].n_kv = 3;
            gguf_number(&kv[i], "llama.expert_used_count", 3);
        }
        g[i].kv = &kv[i];
        g[i].tensors = tensors[i];
        make_gguf(&files[i], &g[i]);
        s[i] = source(names[i], &files[i]);
    }
    for (i = 0; i < 2; i++) {
        if (!CHECK(try_read(&layer, s, 3, "blk.3", i == 0 ? NULL : "mixtral", &error) == MOE_OK)) continue;
        CHECK(has_settings(&layer.config, "top_k=3 n_experts=4 d_ff=32"));
        moe_layer_free(&layer);
    }
    of_no_memory(s, 3, "blk.3");
    REFUSED(moe_import_read(&layer, s + 1, 2, "blk.3", "mixtral", NULL, &error), MOE_ERR_NOT_FOUND,
            "m-00002-of-00003.gguf: part 1 of 3 of this split file is missing");
    swapped = s[0];
    s[0] = s[1];
    s[1] = swapped;
    if (CHECK(moe_import_read(&layer, s, 3, "blk.3", NULL, NULL, &error) == MOE_OK, error.message)) {
        CHECK(has_settings(&layer.config, "top_k=3 n_experts=4 d_ff=32"));
        moe_layer_free(&layer);
    }
    s[1] = s[0];
    s[0] = swapped;
    REFUSED(moe_import_read(&layer, s, 2, "blk.3", NULL, NULL, &error), MOE_ERR_NOT_FOUND,
            "m-00001-of-00003.gguf: part 3 of 3 of this split file is missing");
    s[0].name = names[3];
    REFUSED(moe_import_read(&layer, s, 3, "blk.3", NULL, NULL, &error), MOE_ERR_UNSUPPORTED,
            "model.gguf: part 1 of 3 of a split file; its name must end with -00001-of-00003.gguf");
    s[0].name = names[0];
    s[1].name = names[2];
    s[2].name = names[1];
    REFUSED(moe_import_read(&layer, s, 3, "blk.3", NULL, NULL, &error), MOE_ERR_FORMAT,
            "m-00002-of-00003.gguf: split.no = 2 and split.count = 3: must be 1 and 3");
    of_broken_parts(files, names);
}

/* Parts whose numbers do not fit each other or their names: split.no and split.count as 4 bytes. */
static void of_gguf_part_numbers(void) {
    static const struct {
        const char *name;
        uint32_t no, count;
        moe_status status;
        const char *says;
    } rows_of[] = {
        {"m-00001-of-00002.gguf", 0, 1, MOE_OK, ""},
        {"m-00003-of-00002.gguf", 2, 2, MOE_ERR_UNSUPPORTED, "part 3 of 2 of a split file; open part 1"},
        {"m-4294967295.gguf", 0xfffffffeu, 2, MOE_ERR_UNSUPPORTED, "part 4294967295 of 2 of a split file; open part 1"},
        {"m-00001-of-00002.gguf", 1, 2, MOE_ERR_UNSUPPORTED, "part 2 of 2 of a split file; open part 1"},
        {"short.gguf", 1, 2, MOE_ERR_UNSUPPORTED, "short.gguf: part 2 of 2 of a split file; open part 1"},
        {"m-00002-of-65536.gguf", 1, 65536, MOE_ERR_UNSUPPORTED, "part 2 of 65536 of a split file"},
        {"m-00001-of-65536.gguf", 0, 65536, MOE_ERR_UNSUPPORTED, "part 1 of 65536 of a split file"},
        {"short.gguf", 0, 2, MOE_ERR_UNSUPPORTED, "its name must end with -00001-of-00002.gguf"},
        {"m-00001-of-00002.gguf", 0, 2, MOE_ERR_FORMAT, "m-00002-of-00002.gguf: split.no = 1 and split.count = 3: must "
                                                        "be 1 and 2"}};
    static text file, other, kv, other_kv;
    gguf g;
    size_t i;
    memset(&g, 0, sizeof g);
    g.version = 3;
    g.tensors = "token_embd.weight:0:32";
    g.n_kv = 2;
    g.kv = &other_kv;
    other_kv.n = 0;
    gguf_number(&other_kv, "split.no", 1);
    gguf_number(&other_kv, "split.count", 3);
    make_gguf(&other, &g);
    g.kv = &kv;
    g.arch = "llama";
    g.n_kv = 3;
    g.tensors = gguf_mixtral;
    for (i = 0; i < sizeof rows_of / sizeof rows_of[0]; i++) {
        moe_import_source s[2];
        moe_layer layer;
        moe_error error;
        moe_status status;
        kv.n = 0;
        gguf_number(&kv, "llama.expert_used_count", 3);
        gguf_number(&kv, "split.no", rows_of[i].no);
        gguf_number(&kv, "split.count", rows_of[i].count);
        make_gguf(&file, &g);
        s[0] = source(rows_of[i].name, &file);
        s[1] = source("m-00002-of-00002.gguf", &other);
        status = try_read(&layer, s, 2, "blk.3", NULL, &error);
        CHECKF(status == rows_of[i].status && strstr(error.message, rows_of[i].says) != NULL, "%d: %s", (int)i,
               error.message);
        if (status == MOE_OK) moe_layer_free(&layer);
    }
}

/* What llama.cpp takes for metadata that is missing. */
static void of_gguf_defaults(void) {
    static const struct {
        const char *arch, *more;
        int norm, gating, scale; /* -1: missing */
        const char *says;        /* NULL: refused */
    } rows_of[] = {
        {"qwen3next", "ffn_gate_inp_shexp.weight:0:32", 0, -1, 7, "top_k=2 weight=sum scale=1"},
        {"qwen2moe", "ffn_gate_inp_shexp.weight:0:32", 1, 2, 7, "weight=raw gate=softmax scale=1"},
        {"deepseek2", NULL, -1, -1, -1, "gate=softmax weight=raw scale=1 selection_bias=0"},
        {"deepseek2", NULL, 1, -1, 7, "gate=softmax weight=sum scale=7"},
        {"deepseek2", NULL, 0, 2, 0, "gate=sigmoid weight=raw scale=1"},
        {"deepseek2", "exp_probs_b.bias:0:4", -1, -1, -1, "gate=softmax weight=raw scale=1 selection_bias=1"},
        {"deepseek2", "exp_probs_b.bias:0:4", 1, -1, 7, "gate=softmax weight=sum scale=7"},
        {"glm4moe", "exp_probs_b.bias:0:4", -1, -1, -1, "gate=sigmoid weight=raw scale=1 select=top_k"},
        {"glm4moe", "exp_probs_b.bias:0:4", 1, 1, 7, "gate=softmax weight=sum scale=7"},
        {"dots1", "exp_probs_b.bias:0:4", -1, 2, -1, "gate=sigmoid weight=raw scale=1"},
        {"dots1", "exp_probs_b.bias:0:4", 1, -1, 7, NULL}};
    static text kv;
    size_t i;
    for (i = 0; i < sizeof rows_of / sizeof rows_of[0]; i++) {
        char tensors[600], key[64];
        gguf g;
        memset(&g, 0, sizeof g);
        kv.n = 0;
        sprintf(tensors, "%s blk.3.ffn_gate_shexp.weight:0:32,32 blk.3.ffn_up_shexp.weight:0:32,32 "
                "blk.3.ffn_down_shexp.weight:0:32,32%s%s", gguf_mixtral, rows_of[i].more != NULL ? " blk.3." : "",
                rows_of[i].more != NULL ? rows_of[i].more : "");
        g.arch = rows_of[i].arch;
        g.version = 3;
        g.tensors = tensors;
        g.kv = &kv;
        sprintf(key, "%s.expert_used_count", g.arch);
        gguf_number(&kv, key, 2);
        g.n_kv = 1 + (rows_of[i].norm >= 0) + (rows_of[i].gating >= 0) + (rows_of[i].scale >= 0);
        sprintf(key, "%s.expert_weights_norm", g.arch);
        if (rows_of[i].norm >= 0) gguf_key(&kv, key, 7);
        if (rows_of[i].norm >= 0) put_number(&kv, (uint64_t)rows_of[i].norm, 1);
        sprintf(key, "%s.expert_gating_func", g.arch);
        if (rows_of[i].gating >= 0) gguf_number(&kv, key, (uint32_t)rows_of[i].gating);
        sprintf(key, "%s.expert_weights_scale", g.arch);
        if (rows_of[i].scale >= 0) gguf_key(&kv, key, 6);
        if (rows_of[i].scale >= 0) put_number(&kv, rows_of[i].scale > 0 ? 0x40e00000 : 0, 4);
        gguf_says(&g, "blk.3", NULL, rows_of[i].says != NULL ? MOE_OK : MOE_ERR_NOT_FOUND,
                  rows_of[i].says != NULL ? rows_of[i].says : "metadata: dots1.expert_gating_func is missing",
                  __LINE__);
    }
}

/* Biases of the experts: all or none. Bits of `there`: gate, up, down, gate and up in one. */
static void of_gguf_biases(void) {
    static const char *const names[4] = {"gate_exps", "up_exps", "down_exps", "gate_up_exps"};
    int there;
    for (there = 0; there < 16; there++) {
        const int all = there == 7 || there == 12, twice = there > 8 && there % 4 != 0;
        char tensors[600], says[64];
        gguf g;
        int k, missing = 0;
        memset(&g, 0, sizeof g);
        strcpy(tensors,
               "blk.3.ffn_gate_inp.weight:0:32,4 blk.3.ffn_gate_inp.bias:0:4 blk.3.ffn_gate_exps.weight:0:32,32,4 "
               "blk.3.ffn_up_exps.weight:0:32,32,4 blk.3.ffn_down_exps.weight:0:32,32,4");
        for (k = 0; k < 4; k++)
            if (there >> k & 1)
                sprintf(tensors + strlen(tensors), " blk.3.ffn_%s.bias:0:%d,4", names[k], k < 3 ? 32 : 64);
        for (k = 2; k >= 0; k--)
            if (!(there >> k & 1) && !(there > 7 && k < 2)) missing = k;
        sprintf(says, "'blk.3.ffn_%s.bias': missing in the file", names[missing]);
        g.arch = "gpt-oss";
        g.version = 3;
        g.tensors = tensors;
        if (all) gguf_says(&g, "blk.3", "gpt_oss", MOE_OK, "expert_bias=1", __LINE__);
        else
            gguf_says(&g, "blk.3", "gpt_oss", twice ? MOE_ERR_FORMAT : MOE_ERR_NOT_FOUND,
                      twice ? "duplicates another tensor" : says, __LINE__);
    }
}

/* Every preset on the tensors of a mixtral: where its layer has others, it is refused. */
static void of_presets(void) {
    static text file;
    const moe_preset *preset;
    moe_import_source s;
    moe_layer layer;
    moe_error error;
    int made = 0;
    make_file(&file, AT, mixtral, NULL, NULL);
    s = source(NULL, &file);
    for (preset = moe_presets(); preset->name != NULL; preset++) {
        const moe_status status = try_read(&layer, &s, 1, AT, preset->name, &error);
        CHECK(status == MOE_OK || status == MOE_ERR_CONFIG || status == MOE_ERR_UNSUPPORTED ||
                  status == MOE_ERR_NOT_FOUND,
              preset->name);
        if (status != MOE_OK) continue;
        made++;
        CHECK(layer.tensors[MOE_ROUTER_WEIGHT] != NULL && layer.tensors[MOE_EXPERTS_GATE] != NULL &&
                  layer.config.expert ==
                      (strstr(preset->layer, "expert=glu") != NULL ? MOE_EXPERT_GLU : MOE_EXPERT_SWIGLU),
              preset->name);
        moe_layer_free(&layer);
    }
    CHECK(made > 5);
}

/* ---- every family, and one tensor of it that is wrong ---- */

/* The tensors of a family in the forms that its files have: names, and a letter for each dimension
   (E experts, H and I widths, J 2 I, S the shared expert's, P 2 S, 1). */
typedef struct family_form {
    const char *type; /* model_type; NULL: GGUF of the architecture arch */
    const char *arch, *tensors;
} family_form;

#define W123 "experts.%.w1.weight:IH experts.%.w2.weight:HI experts.%.w3.weight:IH"
#define PROJ "experts.%.gate_proj.weight:IH experts.%.up_proj.weight:IH experts.%.down_proj.weight:HI"
#define FUSED "experts.gate_up_proj:EJH experts.down_proj:EHI"
#define SHARED(of) " " of ".gate_proj.weight:SH " of ".up_proj.weight:SH " of ".down_proj.weight:HS"
#define EXPERTS "ffn_gate_inp.weight:EH ffn_gate_exps.weight:EIH ffn_up_exps.weight:EIH ffn_down_exps.weight:EHI"
#define GATE_UP "ffn_gate_inp.weight:EH ffn_gate_up_exps.weight:EJH ffn_down_exps.weight:EHI"
#define OLDER "ffn_gate_inp.weight:EH ffn_gate.%.weight:IH ffn_up.%.weight:IH ffn_down.%.weight:HI"
#define SHEXP " ffn_gate_shexp.weight:SH ffn_up_shexp.weight:SH ffn_down_shexp.weight:HS"
/* a family that has both forms in safetensors, and in GGUF so many more tensors */
#define FORMS(type, arch, router, each, more, gguf_more) \
    {type, NULL, router " " each more}, {type, NULL, router " " FUSED more}, {NULL, arch, EXPERTS gguf_more}, \
        {NULL, arch, GATE_UP gguf_more}, {NULL, arch, OLDER gguf_more}

static const family_form family_forms[] = {
    FORMS("mixtral", "llama", "gate.weight:EH", W123, "", ""),
    FORMS("phimoe", "phimoe", "gate.weight:EH", W123, "", ""),
    FORMS("minimax_m2", "minimax-m2", "gate.weight:EH", W123, " e_score_correction_bias:E", " exp_probs_b.bias:E"),
    FORMS("qwen2_moe", "qwen2moe", "gate.weight:EH", PROJ, SHARED("shared_expert") " shared_expert_gate.weight:1H",
          SHEXP " ffn_gate_inp_shexp.weight:H"),
    FORMS("qwen3_next", "qwen3next", "gate.weight:EH", PROJ, SHARED("shared_expert") " shared_expert_gate.weight:1H",
          SHEXP " ffn_gate_inp_shexp.weight:H"),
    FORMS("qwen3_moe", "qwen3moe", "gate.weight:EH", PROJ, "", ""),
    FORMS("olmoe", "olmoe", "gate.weight:EH", PROJ, "", ""),
    FORMS("deepseek_v2", "deepseek2", "gate.weight:EH", PROJ, SHARED("shared_experts"), SHEXP),
    FORMS("deepseek_v3", "deepseek2", "gate.weight:EH", PROJ,
          SHARED("shared_experts") " gate.e_score_correction_bias:E", SHEXP " exp_probs_b.bias:E"),
    FORMS("glm4_moe", "glm4moe", "gate.weight:EH", PROJ, SHARED("shared_experts") " gate.e_score_correction_bias:E",
          SHEXP " exp_probs_b.bias:E"),
    FORMS("dots1", "dots1", "gate.weight:EH", PROJ, SHARED("shared_experts") " gate.e_score_correction_bias:E",
          SHEXP " exp_probs_b.bias:E"),
    {"llama4", NULL, "router.weight:EH experts.gate_up_proj:EHJ experts.down_proj:EIH" SHARED("shared_expert")},
    {NULL, "llama4", EXPERTS SHEXP},
    {"gpt_oss", NULL,
     "router.weight:EH router.bias:E experts.gate_up_proj:EHJ experts.gate_up_proj_bias:EJ experts.down_proj:EIH "
     "experts.down_proj_bias:EH"},
    {NULL, "gpt-oss",
     EXPERTS " ffn_gate_inp.bias:E ffn_gate_exps.bias:EI ffn_up_exps.bias:EI ffn_down_exps.bias:EH"},
    {NULL, "gpt-oss", GATE_UP " ffn_gate_inp.bias:E ffn_gate_up_exps.bias:EJ ffn_down_exps.bias:EH"},
    {"granitemoe", NULL, "router.layer.weight:EH input_linear.weight:EJH output_linear.weight:EHI"},
    {NULL, "granitemoe", EXPERTS},
    {"granitemoeshared", NULL,
     "router.layer.weight:EH input_linear.weight:EJH output_linear.weight:EHI shared_mlp.input_linear.weight:PH "
     "shared_mlp.output_linear.weight:HS"},
    {NULL, "granitemoe", EXPERTS SHEXP},
};

enum { MOST_PARTS = 24, PART_EXPERTS = 4 };

typedef struct part {
    char name[64];
    size_t shape[5];
    int n_dims, shard;
} part;

static int parts_of(const char *list, part *parts) {
    static const char letters[] = "EHIJSP1";
    static const size_t sizes[] = {PART_EXPERTS, 6, 5, 10, 7, 14, 1};
    int n = 0, expert;
    while (*list != '\0') {
        const size_t length = strcspn(list, " "), name = strcspn(list, ":");
        for (expert = 0; expert < (memchr(list, '%', name) != NULL ? PART_EXPERTS : 1); expert++, n++) {
            part *p = &parts[n];
            size_t i, to = 0;
            if (n == MOST_PARTS) exit(2);
            for (i = 0; i < name; i++) p->name[to++] = (char)(list[i] == '%' ? '0' + expert : list[i]);
            p->name[to] = '\0';
            p->n_dims = (int)(length - name - 1);
            for (i = name + 1; i < length; i++) p->shape[i - name - 1] = sizes[strchr(letters, list[i]) - letters];
            p->shard = n % 2;
        }
        list += length;
        list += strspn(list, " ");
    }
    return n;
}

static size_t part_count(const part *p) {
    size_t count = 1;
    int i;
    for (i = 0; i < p->n_dims; i++) count *= p->shape[i];
    return count;
}

/* Number i of a tensor. */
static moe_real value_of(size_t i) { return (moe_real)0.25 + (moe_real)i / (1 << 24); }

static void put_values(text *t, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) put_number(t, 0x3e800000 + (i << 1), 4);
}

/* The parts of a shard, or (-1) all, as safetensors of F32. */
static void put_safetensors(text *file, const part *parts, int n, int shard) {
    static text header, data;
    char line[300];
    int i, k, first = 1;
    header.n = data.n = file->n = 0;
    put_text(&header, "{");
    for (i = 0; i < n; i++) {
        size_t at = data.n;
        if (shard >= 0 && parts[i].shard != shard) continue;
        put_values(&data, part_count(&parts[i]));
        sprintf(line, "%s\"" AT ".%s\":{\"dtype\":\"F32\",\"shape\":[", first ? "" : ",", parts[i].name);
        for (k = 0; k < parts[i].n_dims; k++)
            sprintf(line + strlen(line), "%s%lu", k > 0 ? "," : "", (unsigned long)parts[i].shape[k]);
        sprintf(line + strlen(line), "],\"data_offsets\":[%lu,%lu]}", (unsigned long)at, (unsigned long)data.n);
        put_text(&header, line);
        first = 0;
    }
    put_text(&header, "}");
    put_number(file, header.n, 8);
    put(file, header.p, header.n);
    put(file, data.p, data.n);
}

static void put_gguf(text *file, const char *arch, const part *parts, int n) {
    static text data;
    char key[80];
    int i, k;
    data.n = file->n = 0;
    put_text(file, "GGUF");
    put_number(file, 3, 4);
    put_number(file, (uint64_t)n, 8);
    put_number(file, 3, 8);
    gguf_key(file, "general.architecture", 8);
    gguf_string(file, arch);
    sprintf(key, "%s.expert_used_count", arch);
    gguf_number(file, key, 2);
    sprintf(key, "%s.expert_gating_func", arch);
    gguf_number(file, key, 2);
    for (i = 0; i < n; i++) {
        sprintf(key, "blk.3.%s", parts[i].name);
        gguf_string(file, key);
        put_number(file, (uint64_t)parts[i].n_dims, 4);
        for (k = parts[i].n_dims; k > 0; k--) put_number(file, parts[i].shape[k - 1], 8);
        put_number(file, 0, 4);
        put_number(file, data.n, 8);
        put_values(&data, part_count(&parts[i]));
        while (data.n % 32 != 0) put_number(&data, 0, 1);
    }
    while (file->n % 32 != 0) put_number(file, 0, 1);
    put(file, data.p, data.n);
}

/* Reads the parts as the form says; of safetensors alone (sharded 0), or of two files whose index
   lists the first `listed` parts. The layer is the caller's unless kept is NULL. */
static moe_status read_parts(const family_form *form, const part *parts, int n, int sharded, int listed,
                             moe_layer *kept, moe_error *error) {
    static text files[4];
    char line[200];
    moe_import_source sources[4];
    moe_layer layer;
    moe_status status;
    int i, n_sources = 1;
    if (form->type == NULL) put_gguf(&files[0], form->arch, parts, n);
    else {
        files[1].n = 0;
        sprintf(line, "{\"model_type\":\"%s\",\"num_experts_per_tok\":2,\"n_group\":1,\"topk_group\":1}",
                form->type);
        put_text(&files[1], line);
        sources[1] = source("config.json", &files[1]);
        n_sources = sharded ? 4 : 2;
        if (!sharded) put_safetensors(&files[0], parts, n, -1);
    }
    if (sharded) {
        files[0].n = 0;
        put_text(&files[0], "{\"weight_map\":{");
        for (i = 0; i < listed; i++) {
            sprintf(line, "%s\"" AT ".%s\":\"%c\"", i > 0 ? "," : "", parts[i].name, "ab"[parts[i].shard]);
            put_text(&files[0], line);
        }
        put_text(&files[0], "}}");
        put_safetensors(&files[2], parts, n, 0);
        put_safetensors(&files[3], parts, n, 1);
        sources[2] = source("a", &files[2]);
        sources[3] = source("b", &files[3]);
    }
    sources[0] = source("model", &files[0]);
    status = try_read(&layer, sources, (size_t)n_sources, form->type != NULL ? AT : "blk.3", NULL, error);
    if (status == MOE_OK && kept != NULL) *kept = layer;
    else if (status == MOE_OK) moe_layer_free(&layer);
    return status;
}

/* A check that says of what. */
static void refused(const family_form *form, int sharded, const part *p, const char *what, int good,
                    const moe_error *error) {
    char says[500];
    sprintf(says, "%s%s, %s %s: %.250s", form->type != NULL ? form->type : form->arch, sharded ? " in shards" : "",
            p->name, what, error->message);
    CHECK(good, says);
}

/* One tensor less, one twice. */
static void count_wrong(const family_form *form, const part *parts, int n, int sharded) {
    part changed[MOST_PARTS + 1];
    moe_error error;
    moe_status status;
    int i, k, shard;
    for (i = 0; i < n; i++) {
        const part *p = &parts[i];
        /* architectures that have files without it */
        const int optional = form->type == NULL && strcmp(p->name, "exp_probs_b.bias") == 0 &&
                             (strcmp(form->arch, "deepseek2") == 0 || strcmp(form->arch, "dots1") == 0);
        memcpy(changed, parts, (size_t)i * sizeof *parts);
        memcpy(changed + i, parts + i + 1, (size_t)(n - i - 1) * sizeof *parts);
        changed[n - 1] = *p; /* behind those of the file: the index lists it all the same */
        for (k = 0; k <= sharded; k++) {
            status = read_parts(form, changed, n - 1, sharded, n - 1 + k, NULL, &error);
            refused(form, sharded, p, "missing",
                    optional ? status == MOE_OK
                             : status == MOE_ERR_NOT_FOUND &&
                        (strstr(error.message, p->name) != NULL || strstr(error.message, "no router at") != NULL ||
                         (strstr(p->name, "gate_up") != NULL && strstr(error.message, "gate_exps") != NULL)),
                    &error);
        }
        memcpy(changed, parts, (size_t)n * sizeof *parts);
        for (shard = 0; shard <= sharded; shard++) {
            changed[n] = *p;
            changed[n].shard = shard;
            status = read_parts(form, changed, n + 1, sharded, n, NULL, &error);
            refused(form, sharded, p, "twice",
                    status == MOE_ERR_FORMAT && (strstr(error.message, "occurs twice") != NULL ||
                                                 strstr(error.message, "duplicates another") != NULL),
                    &error);
        }
    }
}

/* One tensor with another shape: a size that is more, less, double or 0, two sizes exchanged, a
   dimension more or less. */
static void shape_wrong(const family_form *form, const part *parts, int n, int sharded) {
    part changed[MOST_PARTS];
    moe_error error;
    moe_status status;
    int i, k, way;
    memcpy(changed, parts, (size_t)n * sizeof *parts);
    for (i = 0; i < n; i++) {
        part *p = &changed[i];
        for (k = 0; k < p->n_dims; k++)
            for (way = 0; way < 7; way++) {
                const size_t size = p->shape[k];
                if (way < 4) p->shape[k] = way == 0 ? size + 1 : way == 1 ? size - 1 : way == 2 ? 2 * size : 0;
                if (way == 4) {
                    p->shape[k] = p->shape[0];
                    p->shape[0] = size;
                }
                if (way == 5) p->shape[p->n_dims++] = 1;
                if (way == 6) p->n_dims--;
                if (way != 4 || k > 0) {
                    status = read_parts(form, changed, n, sharded, n, NULL, &error);
                    refused(form, sharded, p, "of another shape",
                            status == MOE_ERR_SHAPE || status == MOE_ERR_NOT_FOUND, &error);
                }
                *p = parts[i];
            }
    }
}

/* Gate and up rows of a fused tensor are its halves, or alternate in gpt-oss; [in,out] in llama4
   and gpt-oss as folders. */
static void fused_right(const family_form *form, const part *p, const moe_layer *layer) {
    const int turned = p->shape[1] == 6, alternate = form->type != NULL && strcmp(form->type, "gpt_oss") == 0;
    const size_t in = turned ? p->shape[1] : p->shape[2], out = (turned ? p->shape[2] : p->shape[1]) / 2;
    size_t second, e, i, j, wrong = 0;
    for (second = 0; second < 2; second++)
        for (e = 0; e < PART_EXPERTS; e++)
            for (i = 0; i < out; i++)
                for (j = 0; j < in; j++) {
                    const size_t line = alternate ? 2 * i + second : second * out + i;
                    const size_t at = e * 2 * out * in + (turned ? j * 2 * out + line : line * in + j);
                    wrong += layer->tensors[second > 0 ? MOE_EXPERTS_UP : MOE_EXPERTS_GATE][(e * out + i) * in + j] !=
                             value_of(at);
                }
    CHECK(wrong == 0, form->type != NULL ? form->type : form->arch);
}

static void of_families(void) {
    part parts[MOST_PARTS];
    moe_layer layer;
    moe_error error;
    int n_fused = 0, k;
    size_t i;
    int sharded;
    for (i = 0; i < sizeof family_forms / sizeof family_forms[0]; i++) {
        const family_form *form = &family_forms[i];
        const int n = parts_of(form->tensors, parts);
        for (sharded = 0; sharded <= (form->type != NULL); sharded++) {
            const moe_status status = read_parts(form, parts, n, sharded, n, &layer, &error);
            refused(form, sharded, &parts[0], "and all others", status == MOE_OK, &error);
            for (k = 0; k < n && status == MOE_OK; k++)
                if (parts[k].n_dims == 3 && (parts[k].shape[1] == 10 || parts[k].shape[2] == 10)) {
                    fused_right(form, &parts[k], &layer);
                    n_fused++;
                }
            if (status == MOE_OK) moe_layer_free(&layer);
            count_wrong(form, parts, n, sharded);
            shape_wrong(form, parts, n, sharded);
        }
    }
    CHECK(n_fused > 20, "fused tensors");
}

/* Files cut off at every byte, and with every byte changed: nothing worse than an error may come of
   it. */
static void of_spoilt(const text *good, const char *prefix, const char *name) {
    static const unsigned char other[3] = {0, 0xff, '"'};
    size_t i, n;
    int k;
    for (i = 0; i < good->n; i++)
        for (k = 0; k < 5; k++) {
            char *exact;
            moe_import_source s;
            moe_layer layer;
            moe_error error;
            n = k == 4 ? i : good->n;
            exact = (char *)grab(1, n); /* so that a sanitizer sees one byte too far */
            memcpy(exact, good->p, n);
            if (k < 4) exact[i] = (char)(k < 3 ? other[k] : (unsigned char)exact[i] ^ 1u);
            s = moe_import_memory(name, exact, n);
            if (try_read(&layer, &s, 1, prefix, "mixtral", &error) == MOE_OK) {
                if (k == 4) CHECK(!"a file that was cut off is read");
                moe_layer_free(&layer);
            }
            free(exact);
        }
}

/* ---- calls ---- */

static moe_status write_some(void *ctx, const void *from, size_t size) {
    size_t *room = (size_t *)ctx;
    (void)from;
    if (size > *room) return MOE_ERR_SPACE;
    *room -= size;
    return MOE_OK;
}

static moe_status refuse_read(void *ctx, uint64_t at, void *to, size_t size) {
    (void)ctx;
    (void)at;
    memset(to, 0, size);
    return MOE_ERR_IO;
}

static void of_reading_calls(const text *file) {
    char name[300], *longer = (char *)grab(1, 5000);
    moe_import_source s = source(NULL, file), none = s;
    moe_layer layer;
    moe_error error;
    memset(name, 'a', sizeof name);
    name[sizeof name - 1] = '\0';
    memset(longer, 'b', 4999);
    longer[4999] = '\0';
    REFUSED(moe_import_read(NULL, &s, 1, AT, NULL, NULL, &error), MOE_ERR_ARGUMENT, "is NULL");
    REFUSED(moe_import_read(&layer, NULL, 1, AT, NULL, NULL, &error), MOE_ERR_ARGUMENT, "is NULL");
    REFUSED(moe_import_read(&layer, &s, 0, AT, NULL, NULL, &error), MOE_ERR_ARGUMENT, "no sources");
    REFUSED(moe_import_read(&layer, &s, 1, NULL, NULL, NULL, &error), MOE_ERR_ARGUMENT, "prefix is NULL");
    REFUSED(moe_import_read(&layer, &s, 1, name, NULL, NULL, &error), MOE_ERR_ARGUMENT, "prefix: longer than 180");
    none.read_at = NULL;
    REFUSED(moe_import_read(&layer, &none, 1, AT, NULL, NULL, &error), MOE_ERR_ARGUMENT, "read_at is NULL");
    none = s;
    none.read_at = refuse_read;
    REFUSED(moe_import_read(&layer, &none, 1, AT, NULL, NULL, &error), MOE_ERR_IO, "the file: cannot read at byte 0");
    none = s;
    none.size = UINT64_MAX;
    REFUSED(moe_import_read(&layer, &none, 1, AT, NULL, NULL, &error), MOE_ERR_OVERFLOW, "too large for size_t");
    none = moe_import_memory("x", NULL, 100);
    REFUSED(moe_import_read(&layer, &none, 1, AT, NULL, NULL, &error), MOE_ERR_FORMAT,
            "not a safetensors file, an index");
    REFUSED(moe_import_layer(&layer, "no such file.safetensors", AT, NULL, NULL, &error), MOE_ERR_IO,
            "cannot open no such file.safetensors: ");
    REFUSED(moe_import_layer(&layer, "no such folder", AT, NULL, NULL, &error), MOE_ERR_IO,
            "cannot open no such folder: ");
    REFUSED(moe_import_layer(NULL, "x", AT, NULL, NULL, &error), MOE_ERR_ARGUMENT, "is NULL");
    REFUSED(moe_import_layer(&layer, NULL, AT, NULL, NULL, &error), MOE_ERR_ARGUMENT, "is NULL");
    REFUSED(moe_import_layer(&layer, "x", NULL, NULL, NULL, &error), MOE_ERR_ARGUMENT, "is NULL");
    memcpy(name + sizeof name - 6, ".gguf", 6);
    REFUSED(moe_import_layer(&layer, name, AT, NULL, NULL, &error), MOE_ERR_ARGUMENT, "the file name is longer");
    REFUSED(moe_import_layer(&layer, longer, AT, NULL, NULL, &error), MOE_ERR_ARGUMENT, "the path is longer");
    free(longer);
}

static void refuse_writing(moe_layer *layer, moe_buffer *buffer, moe_stream *stream) {
    moe_import_source s;
    moe_layer copy;
    moe_error error;
    moe_stream small;
    size_t room = 10;
    REFUSED(moe_import_write(layer, stream, AT, "deepseek_v3", MOE_DTYPE_F32, &error), MOE_ERR_CONFIG,
            "gate.e_score_correction_bias");
    copy = *layer;
    copy.tensors[MOE_EXPERTS_UP] = NULL;
    REFUSED(moe_import_write(&copy, stream, AT, "mixtral", MOE_DTYPE_F32, &error), MOE_ERR_ARGUMENT,
            "experts.up' is not set");
    copy = *layer;
    copy.config.d_out = 5;
    REFUSED(moe_import_write(&copy, stream, AT, "mixtral", MOE_DTYPE_F32, &error), MOE_ERR_CONFIG, "d_out = 5");
    CHECK(buffer->size == 0);
    small.ctx = &room;
    small.read = NULL;
    small.write = write_some;
    REFUSED(moe_import_write(layer, &small, AT, "mixtral", MOE_DTYPE_F32, &error), MOE_ERR_SPACE, "the stream failed");
    strcpy(error.message, "unchanged on success");
    CHECK(moe_import_write(layer, stream, AT, "mixtral", MOE_DTYPE_F32, &error) == MOE_OK);
    CHECK(strcmp(error.message, "unchanged on success") == 0);
    room = buffer->size - 10;
    moe_buffer_free(buffer);
    REFUSED(moe_import_write(layer, &small, AT, "mixtral", MOE_DTYPE_F32, &error), MOE_ERR_SPACE, "the stream failed");
    small.write = NULL;
    REFUSED(moe_import_write(layer, &small, AT, "mixtral", MOE_DTYPE_F32, &error), MOE_ERR_ARGUMENT, "is NULL");
    REFUSED(moe_import_save(NULL, "published-test.safetensors", AT, "mixtral", MOE_DTYPE_F32, &error), MOE_ERR_ARGUMENT,
            "is NULL");
    REFUSED(moe_import_save(layer, NULL, AT, "mixtral", MOE_DTYPE_F32, &error), MOE_ERR_ARGUMENT, "path");
    REFUSED(moe_import_save(layer, "published-test.safetensors", AT, "olmo", MOE_DTYPE_F32, &error), MOE_ERR_NOT_FOUND,
            "family = olmo");
    CHECK(fopen("published-test.safetensors", "rb") == NULL);
    /* what was written is read again, with the same bits */
    CHECK(moe_import_write(layer, stream, "x", "qwen3_moe", MOE_REAL_IS_DOUBLE ? MOE_DTYPE_F64 : MOE_DTYPE_F32,
                           &error) == MOE_OK);
    s = moe_import_memory("x", buffer->data, buffer->size);
    /* 8 of 4 experts */
    CHECK(moe_import_read(&copy, &s, 1, "x", "qwen3_moe", NULL, &error) == MOE_ERR_CONFIG, error.message);
    CHECK(moe_import_read(&copy, &s, 1, "x", "grok1", NULL, &error) == MOE_OK, error.message);
    CHECK(copy.memory_size == layer->memory_size && memcmp(copy.memory, layer->memory, layer->memory_size) == 0);
    moe_layer_free(&copy);
}

/* Whether a layer of these tensors, written as its family, says this in its header. */
static int writes(const char *list, const char *more, const char *config, const char *family, int dtype,
                  const char *said) {
    static text file;
    moe_import_source sources[2];
    moe_layer layer;
    moe_error error;
    moe_buffer buffer;
    moe_stream stream;
    size_t i, length;
    int found = 0;
    memset(&buffer, 0, sizeof buffer);
    stream = moe_buffer_stream(&buffer);
    make_file(&file, AT, list, more, NULL);
    sources[0] = source(NULL, &file);
    sources[1] = moe_import_memory("config.json", config, strlen(config));
    if (!CHECK(moe_import_read(&layer, sources, 2, AT, NULL, NULL, &error) == MOE_OK, error.message)) return -1;
    CHECK(moe_import_write(&layer, &stream, "x", family, dtype, &error) == MOE_OK, error.message);
    length = buffer.size > 8 ? (size_t)buffer.data[0] | (size_t)buffer.data[1] << 8 : 0;
    for (i = 8; i + strlen(said) <= 8 + length; i++) found |= memcmp(buffer.data + i, said, strlen(said)) == 0;
    moe_buffer_free(&buffer);
    moe_layer_free(&layer);
    return found;
}

/* A selection bias keeps 32 bits where weights have 16, and 64 where they have 64; of the forms
   that a family may have one is written. */
static void of_written_headers(void) {
    static const char v3[] =
        "{\"model_type\":\"deepseek_v3\",\"num_experts_per_tok\":2,\"n_group\":2,\"topk_group\":2}";
    static const char bias[] = "\"x.gate.e_score_correction_bias\":{\"dtype\":\"F";
    char wanted[80];
    sprintf(wanted, "%s32\"", bias);
    CHECK(writes(qwen3, correction, v3, "deepseek_v3", MOE_DTYPE_BF16, wanted) == 1);
    sprintf(wanted, "%s64\"", bias);
    CHECK(writes(qwen3, correction, v3, "deepseek_v3", MOE_DTYPE_F64, wanted) == 1);
    CHECK(writes(gpt_oss, NULL, "{\"model_type\":\"gpt_oss\"}", "gpt_oss", MOE_DTYPE_F32, "gate_up_proj\"") == 1);
    CHECK(writes(gpt_oss, NULL, "{\"model_type\":\"gpt_oss\"}", "gpt_oss", MOE_DTYPE_F32, "_blocks") == 0);
}

static void of_writing_calls(const text *file) {
    char name[300];
    moe_import_source s = source(NULL, file);
    moe_layer layer;
    moe_layer_config config;
    moe_error error;
    moe_buffer buffer;
    moe_stream stream;
    memset(&buffer, 0, sizeof buffer);
    memset(name, 'a', sizeof name);
    name[sizeof name - 1] = '\0';
    stream = moe_buffer_stream(&buffer);
    CHECK(moe_import_read(&layer, &s, 1, AT, NULL, NULL, &error) == MOE_OK);
    REFUSED(moe_import_write(NULL, &stream, AT, "mixtral", MOE_DTYPE_F32, &error), MOE_ERR_ARGUMENT, "is NULL");
    REFUSED(moe_import_write(&layer, NULL, AT, "mixtral", MOE_DTYPE_F32, &error), MOE_ERR_ARGUMENT, "is NULL");
    REFUSED(moe_import_write(&layer, &stream, NULL, "mixtral", MOE_DTYPE_F32, &error), MOE_ERR_ARGUMENT, "is NULL");
    REFUSED(moe_import_write(&layer, &stream, AT, NULL, MOE_DTYPE_F32, &error), MOE_ERR_ARGUMENT, "is NULL");
    REFUSED(moe_import_write(&layer, &stream, AT, "smoe", MOE_DTYPE_F32, &error), MOE_ERR_NOT_FOUND, "family = smoe");
    REFUSED(moe_import_write(&layer, &stream, AT, "mixtral", MOE_DTYPE_I64, &error), MOE_ERR_ARGUMENT, "dtype = 4");
    REFUSED(moe_import_write(&layer, &stream, AT, "mixtral", -1, &error), MOE_ERR_ARGUMENT, "dtype = -1");
    REFUSED(moe_import_write(&layer, &stream, name, "mixtral", MOE_DTYPE_F32, &error), MOE_ERR_ARGUMENT, "prefix");
    REFUSED(moe_import_write(&layer, &stream, "a\xff", "mixtral", MOE_DTYPE_F32, &error), MOE_ERR_ARGUMENT,
            "not UTF-8");
    REFUSED(moe_import_write(&layer, &stream, AT, "gpt_oss", MOE_DTYPE_F32, &error), MOE_ERR_CONFIG,
            "gpt_oss has a tensor 'router.bias'");
    refuse_writing(&layer, &buffer, &stream);
    moe_layer_free(&layer);
    moe_buffer_free(&buffer);
    /* a layer that no family has */
    CHECK(moe_layer_preset("switch", &config, &error) == MOE_OK);
    config.router.d_model = 4;
    config.router.n_experts = 4;
    config.d_ff = 4;
    CHECK(moe_layer_create(&layer, &config, 0, 1, NULL, &error) == MOE_OK);
    REFUSED(moe_import_write(&layer, &stream, AT, "mixtral", MOE_DTYPE_F32, &error), MOE_ERR_CONFIG,
            "'experts.fc1.weight', but mixtral has no tensor for it");
    moe_layer_free(&layer);
    moe_buffer_free(&buffer);
}

/* Numbers at the ends of the narrower types. */
static void of_numbers(void) {
    static const double values[] = {0,
                                    -0.0,
                                    1,
                                    -1.5,
                                    65504,
                                    65519,
                                    65520,
                                    -1e6,
                                    3.3895e38,
                                    3.4028234e38,
                                    1e-8,
                                    -6e-8,
                                    5.9604644775390625e-8,
                                    1e-40,
                                    0.1,
                                    1.0 / 3};
    moe_layer_config config;
    moe_layer layer, back;
    moe_error error;
    moe_buffer buffer;
    moe_stream stream;
    moe_import_source s;
    moe_tensor t;
    int dtype, i;
    CHECK(moe_layer_preset("mixtral", &config, &error) == MOE_OK);
    config.router.d_model = 4;
    config.router.n_experts = 4;
    config.d_ff = 1;
    CHECK(moe_layer_create(&layer, &config, 0, 1, NULL, &error) == MOE_OK);
    CHECK(moe_layer_find(&layer, "router.weight", &t) == MOE_OK && t.count == 16);
    for (i = 0; i < 16; i++) t.data[i] = (moe_real)values[i];
    for (dtype = MOE_DTYPE_F64; dtype <= MOE_DTYPE_BF16; dtype++) {
        const double step = ldexp(1, dtype == MOE_DTYPE_F16 ? -11 : dtype == MOE_DTYPE_BF16 ? -8 : -24);
        const double least = ldexp(1, dtype == MOE_DTYPE_F16 ? -25 : -134);
        memset(&buffer, 0, sizeof buffer);
        stream = moe_buffer_stream(&buffer);
        CHECK(moe_import_write(&layer, &stream, "x", "mixtral", dtype, &error) == MOE_OK);
        s = moe_import_memory("x", buffer.data, buffer.size);
        if (!CHECK(moe_import_read(&back, &s, 1, "x", "mixtral", NULL, &error) == MOE_OK, error.message)) continue;
        for (i = 0; i < 16; i++) {
            const moe_real *of = &back.tensors[MOE_ROUTER_WEIGHT][i];
            const double want = (double)t.data[i], found = (double)*of;
            if (dtype == MOE_DTYPE_F64 || (dtype == MOE_DTYPE_F32 && !MOE_REAL_IS_DOUBLE))
                CHECK(memcmp(&t.data[i], of, sizeof *of) == 0);
            else if (dtype == MOE_DTYPE_F16 && fabs(want) >= 65520) CHECK(found == (want < 0 ? -HUGE_VAL : HUGE_VAL));
            else if (dtype == MOE_DTYPE_BF16 && fabs(want) >= 3.396e38) CHECK(found == HUGE_VAL);
            else CHECK(fabs(found - want) <= step * fabs(want) + least);
        }
        moe_layer_free(&back);
        moe_buffer_free(&buffer);
    }
    moe_layer_free(&layer);
}

/* In the double build: what floats cannot hold. */
static void of_large_numbers(void) {
#if MOE_REAL_IS_DOUBLE
    static const double values[4] = {3.4028235677973366e38, -1e300, 3.4028235e38, -3.40282356e38};
    const double wanted[4] = {HUGE_VAL, -HUGE_VAL, 3.4028234663852886e38, -3.4028234663852886e38};
    moe_layer_config config;
    moe_layer layer, back;
    moe_error error;
    moe_buffer buffer;
    moe_stream stream;
    moe_import_source s;
    moe_tensor t;
    int i;
    memset(&buffer, 0, sizeof buffer);
    stream = moe_buffer_stream(&buffer);
    CHECK(moe_layer_preset("mixtral", &config, &error) == MOE_OK);
    config.router.d_model = 4;
    config.router.n_experts = 4;
    config.d_ff = 1;
    CHECK(moe_layer_create(&layer, &config, 0, 1, NULL, &error) == MOE_OK &&
          moe_layer_find(&layer, "router.weight", &t) == MOE_OK);
    for (i = 0; i < 4; i++) t.data[i] = values[i];
    CHECK(moe_import_write(&layer, &stream, "x", "mixtral", MOE_DTYPE_F32, &error) == MOE_OK);
    s = moe_import_memory("x", buffer.data, buffer.size);
    CHECK(moe_import_read(&back, &s, 1, "x", "mixtral", NULL, &error) == MOE_OK);
    for (i = 0; i < 4; i++) CHECK(back.tensors[MOE_ROUTER_WEIGHT][i] == wanted[i]);
    moe_layer_free(&back);
    moe_layer_free(&layer);
    moe_buffer_free(&buffer);
#endif
}

/* Files that say they are too large, or that end too early. */
static void of_sizes(const text *file) {
    static const char shards[] = "{\"weight_map\":{\"model.layers.3.mlp.gate.weight\":\"b\"}}";
    moe_import_source s[2];
    moe_layer layer;
    moe_error error;
    s[0] = moe_import_memory("x.gguf", "GGUF\3\0\0\0\0\0\0\0\0\0\0\0", 16);
    s[0].size = UINT64_MAX;
    REFUSED(moe_import_read(&layer, s, 1, AT, NULL, NULL, &error), MOE_ERR_OVERFLOW,
            "x.gguf: the file is too large for size_t");
    s[0] = moe_import_memory("x.json", shards, sizeof shards - 1);
    s[0].size = 100000001;
    REFUSED(moe_import_read(&layer, s, 1, AT, NULL, NULL, &error), MOE_ERR_UNSUPPORTED,
            "x.json: the file has 100000001 bytes; at most 100000000 are allowed");
    s[0].size = sizeof shards - 1;
    s[1] = moe_import_memory("b", "abc", 3);
    REFUSED(moe_import_read(&layer, s, 2, AT, NULL, NULL, &error), MOE_ERR_FORMAT, "b: the file ends before byte 8");
    s[0] = source(NULL, file);
    s[1] = moe_import_memory("config.json", "{}", 2);
    s[1].size = 1048577;
    REFUSED(moe_import_read(&layer, s, 2, AT, NULL, NULL, &error), MOE_ERR_UNSUPPORTED,
            "config.json: the file has 1048577 bytes; at most 1048576 are allowed");
}

#if SIZE_MAX > 0xFFFFFFFF
/* Layers that would make a file beyond size_t: of one tensor, and of all together. */
static void of_endless_files(void) {
    static const char *const families[] = {"gpt_oss", "mixtral"};
    static const char *const words[] = {"': too large for size_t", "the file is too large for size_t"};
    static moe_real data[1];
    size_t i;
    for (i = 0; i < 2; i++) {
        moe_buffer buffer;
        moe_stream stream;
        moe_layer_config config;
        moe_parameter slot;
        moe_error error;
        moe_layer layer;
        int place;
        memset(&buffer, 0, sizeof buffer);
        memset(&layer, 0, sizeof layer);
        stream = moe_buffer_stream(&buffer);
        CHECK(moe_layer_preset(families[i], &config, &error) == MOE_OK);
        config.router.d_model = 16777216;
        config.d_ff = 16777216;
        config.router.n_experts = 4096;
        if (!CHECK(moe_layer_init(&layer, &config, &error) == MOE_OK, error.message)) continue;
        for (place = 0; place < MOE_LAYER_PARAMETER_COUNT; place++)
            if (moe_layer_parameter(&layer.config, place, &slot) == MOE_OK) layer.tensors[place] = data; /* not read */
        REFUSED(moe_import_write(&layer, &stream, AT, families[i], MOE_DTYPE_F64, &error), MOE_ERR_OVERFLOW, words[i]);
        CHECK(buffer.size == 0);
        moe_buffer_free(&buffer);
    }
}
#endif

/* A long file name and a long prefix leave room for the whole reason. */
static void of_long_texts(void) {
    static const gguf g = {"llama", 3, 0, NULL, "%s.ffn_gate_inp.weight:0:32,4 %s.ffn_gate_exps.weight:9:32,2,4", 0, 0};
    static text file;
    char name[201], prefix[61], tensors[300];
    gguf made = g;
    moe_import_source s;
    moe_layer layer;
    moe_error error;
    memset(name, 'n', 200);
    name[200] = '\0';
    memset(prefix, 'p', 60);
    prefix[60] = '\0';
    s = moe_import_memory(name, "no file", 7);
    REFUSED(moe_import_read(&layer, &s, 1, AT, NULL, NULL, &error), MOE_ERR_FORMAT,
            "nnn: not a safetensors file, an index of safetensors files or a GGUF file");
    sprintf(tensors, g.tensors, prefix, prefix);
    made.tensors = tensors;
    make_gguf(&file, &made);
    s = source(name, &file);
    REFUSED(moe_import_read(&layer, &s, 1, prefix, NULL, NULL, &error), MOE_ERR_UNSUPPORTED,
            "'...pppppppppppppppppppppppppppppppp.ffn_gate_exps.weight': GGUF type Q8_1 is not supported; F32, F16, "
            "BF16, F64, Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS and MXFP4 are");
}

static void of_hands(void) {
    static text file;
    moe_import_source one;
    gguf g;
    of_rows();
    of_indexes();
    of_gguf();
    of_equal_keys();
    of_prefixes();
    of_gguf_parts();
    of_gguf_part_numbers();
    of_gguf_defaults();
    of_gguf_biases();
    of_presets();
    make_file(&file, AT, mixtral, NULL, NULL);
    one = source(NULL, &file);
    of_no_memory(&one, 1, AT);
    of_reading_calls(&file);
    of_writing_calls(&file);
    of_written_headers();
    of_sizes(&file);
    of_long_texts();
#if SIZE_MAX > 0xFFFFFFFF
    of_endless_files();
#endif
    of_numbers();
    of_large_numbers();
    make_file(&file, AT, "gate.weight:F32:2,2 experts.gate_up_proj:F16:2,2,2 experts.down_proj:BF16:2,2,1", NULL, NULL);
    of_spoilt(&file, AT, "spoilt");
    memset(&g, 0, sizeof g);
    g.arch = "llama";
    g.version = 3;
    g.tensors =
        "blk.3.ffn_gate_inp.weight:0:32,2 blk.3.ffn_gate_up_exps.weight:2:32,2,2 blk.3.ffn_down_exps.weight:1:1,32,2";
    make_gguf(&file, &g);
    of_spoilt(&file, "blk.3", "spoilt.gguf");
}

int main(int argc, char **argv) {
    CASE(of_hands());
    CASE(of_families());
    if (argc < 2 || strcmp(argv[1], "hands") != 0) CASE(of_another_program(argc > 1 ? argv[1] : "1"));
    return test_end();
}
