/* Tests moe_import_model apart from what its models compute (tests/golden/models.c): where it reads
   from, options, every failure of memory, tensors and settings that are missing, extra or wrong,
   and files that end early or have other bytes. It reads the files of tests/golden/models and the
   small models of tests/fuzz/corpus/files.
       cc -std=c99 -O1 -DMOE_NO_SIMD -I. tests/unit/imported.c -o imported -lm && ./imported */

#define MOE_IMPLEMENTATION
#include "../all.h"
#include "../test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FOLDER "tests/golden/models/"
#define GGUF FOLDER "iq4_nl-llama.gguf"
#define GGUF_OSS FOLDER "mxfp4-gpt-oss.gguf"

/* ---- files in memory ---- */

typedef struct bytes {
    unsigned char *p;
    size_t n;
} bytes;

static bytes read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    bytes b;
    long size;
    if (file == NULL || fseek(file, 0, SEEK_END) != 0 || (size = ftell(file)) < 0) {
        fprintf(stderr, "cannot read %s from this folder\n", path);
        exit(2);
    }
    rewind(file);
    b.n = (size_t)size;
    b.p = (unsigned char *)grab(b.n, 1);
    if (fread(b.p, 1, b.n, file) != b.n) exit(2);
    fclose(file);
    return b;
}

static size_t find(bytes b, const char *text, size_t from) {
    const size_t n = strlen(text);
    for (; from + n <= b.n; from++)
        if (memcmp(b.p + from, text, n) == 0) return from;
    return b.n;
}

/* A copy in which `with` takes the place of the first `text`, as long as it. */
static bytes replaced(bytes b, const char *text, const char *with) {
    bytes copy;
    const size_t at = find(b, text, 0);
    copy.n = b.n;
    copy.p = (unsigned char *)grab(b.n, 1);
    memcpy(copy.p, b.p, b.n);
    CHECK(at < b.n && strlen(text) == strlen(with), text);
    if (at < b.n) memcpy(copy.p + at, with, strlen(with));
    return copy;
}

/* What a model says of four tokens. */
static int logits(moe_imported *model, moe_real *y) {
    int32_t ids[4] = {1, 5, 3, 2};
    moe_call call;
    moe_net_pass pass;
    void *work;
    size_t size;
    int i;
    moe_status status;
    for (i = 0; i < 4; i++) ids[i] %= model->vocabulary;
    memset(&call, 0, sizeof call);
    call.n_tokens = 4;
    call.token_ids = ids;
    if (moe_net_work_size(&model->net, 4, 0, &size) != MOE_OK) return 0;
    work = grab(size, 1);
    status = moe_net_forward(&model->net, &call, work, size, &pass);
    if (status == MOE_OK) memcpy(y, pass.y, 4 * (size_t)model->vocabulary * sizeof *y);
    free(work);
    return status == MOE_OK;
}

enum { LOGITS = 4 * 128 };

/* ---- where models are read from ---- */

/* A source whose bytes must be copied. */
static moe_status read_slowly(void *ctx, uint64_t at, void *to, size_t size) {
    memcpy(to, ((const bytes *)ctx)->p + (size_t)at, size);
    return MOE_OK;
}

static void test_sources(void) {
    static moe_real of_path[LOGITS], of_memory[LOGITS], of_copy[LOGITS];
    moe_imported model;
    moe_import_source source;
    moe_error error;
    bytes b = read_file(GGUF);
    if (!CHECK(moe_import_model(&model, GGUF, NULL, NULL, &error) == MOE_OK, error.message)) return;
    CHECK(strcmp(model.architecture, "llama") == 0 && model.vocabulary == 80 && model.n_blocks == 2);
    CHECK(model.context == 4096 && model.file_bytes == b.n);
    CHECK(logits(&model, of_path));
    moe_import_free(&model);
    moe_import_free(&model);
    moe_import_free(NULL);
    source = moe_import_memory(NULL, b.p, b.n);
    if (!CHECK(moe_import_read_model(&model, &source, 1, NULL, NULL, &error) == MOE_OK, error.message)) return;
    CHECK(logits(&model, of_memory) && same_reals(of_path, of_memory, 4 * 80));
    moe_import_free(&model);
    source.ctx = &b;
    source.read_at = read_slowly;
    if (!CHECK(moe_import_read_model(&model, &source, 1, NULL, NULL, &error) == MOE_OK, error.message)) return;
    free(b.p);
    CHECK(logits(&model, of_copy) && same_reals(of_path, of_copy, 4 * 80));
    moe_import_free(&model);
}

/* A folder through sources, config.json among them. */
static void test_folder(void) {
    static moe_real of_path[LOGITS], of_memory[LOGITS];
    moe_imported model;
    moe_import_source sources[2];
    moe_error error;
    bytes file = read_file(FOLDER "deepseek_v3-bf16/model.safetensors");
    bytes config = read_file(FOLDER "deepseek_v3-bf16/config.json");
    if (!CHECK(moe_import_model(&model, FOLDER "deepseek_v3-bf16", NULL, NULL, &error) == MOE_OK, error.message))
        return;
    CHECK(strcmp(model.architecture, "deepseek2") == 0 && model.n_blocks == 2);
    CHECK(logits(&model, of_path));
    moe_import_free(&model);
    sources[0] = moe_import_memory("model.safetensors", file.p, file.n);
    sources[1] = moe_import_memory("config.json", config.p, config.n);
    if (!CHECK(moe_import_read_model(&model, sources, 2, NULL, NULL, &error) == MOE_OK, error.message)) return;
    CHECK(logits(&model, of_memory) && same_reals(of_path, of_memory, 4 * 80));
    moe_import_free(&model);
    CHECK_STATUS(moe_import_read_model(&model, sources, 1, NULL, NULL, &error), MOE_ERR_NOT_FOUND);
    CHECK(strcmp(error.message, "model.safetensors: there is no config.json beside it") == 0, error.message);
    free(file.p);
    free(config.p);
}

/* ---- options ---- */

static void test_options(void) {
    static moe_real all[LOGITS], one[LOGITS];
    moe_imported model;
    moe_import_options options;
    moe_error error;
    const moe_import_source nothing = moe_import_memory(NULL, "", 0);
    bytes file;
    memset(&options, 0, sizeof options);
    if (!CHECK(moe_import_model(&model, GGUF, NULL, NULL, &error) == MOE_OK, error.message)) return;
    CHECK(logits(&model, all));
    moe_import_free(&model);
    options.top_k = 1;
    options.exact = 1;
    options.context = 100;
    if (!CHECK(moe_import_model(&model, GGUF, &options, NULL, &error) == MOE_OK, error.message)) return;
    CHECK(model.context == 100 && logits(&model, one) && !same_reals(all, one, 4 * 80));
    moe_import_free(&model);
    options.top_k = 100; /* more than the model has: as many as it has */
    options.exact = 0;
    options.context = 0;
    if (!CHECK(moe_import_model(&model, GGUF, &options, NULL, &error) == MOE_OK, error.message)) return;
    CHECK(logits(&model, one) && same_reals(all, one, 4 * 80));
    moe_import_free(&model);
    options.memory = 1000;
    CHECK_STATUS(moe_import_model(&model, GGUF, &options, NULL, &error), MOE_ERR_MEMORY);
    CHECK(strstr(error.message, "options.memory allows 1000") != NULL, error.message);
    CHECK(model.net.modules == NULL && model.owned == NULL);
    file = read_file(GGUF);
    free(file.p);
    options.memory = file.n - 1;
    CHECK_STATUS(moe_import_model(&model, GGUF, &options, NULL, &error), MOE_ERR_MEMORY);
    options.memory = file.n;
    CHECK_STATUS(moe_import_model(&model, GGUF, &options, NULL, &error), MOE_OK);
    moe_import_free(&model);
    options.context = -1;
    CHECK_STATUS(moe_import_model(&model, GGUF, &options, NULL, &error), MOE_ERR_CONFIG);
    options.context = 0;
    options.top_k = -1;
    CHECK_STATUS(moe_import_model(&model, GGUF, &options, NULL, &error), MOE_ERR_CONFIG);
    options.top_k = 0;
    options.cache_type = MOE_TYPE_Q4;
    CHECK_STATUS(moe_import_model(&model, GGUF, &options, NULL, &error), MOE_ERR_CONFIG);
    CHECK(strstr(error.message, "cache_type") != NULL, error.message);
    options.cache_type = MOE_TYPE_REAL;
    options.kernels = MOE_KERNELS_COUNT;
    CHECK(moe_import_model(&model, GGUF, &options, NULL, &error) != MOE_OK);
    CHECK_STATUS(moe_import_model(NULL, GGUF, NULL, NULL, &error), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_import_model(&model, NULL, NULL, NULL, &error), MOE_ERR_ARGUMENT);
    memset(&model, 1, sizeof model);
    CHECK_STATUS(moe_import_read_model(&model, NULL, 1, NULL, NULL, NULL), MOE_ERR_ARGUMENT);
    CHECK(model.owned == NULL && model.net.modules == NULL);
    CHECK_STATUS(moe_import_read_model(&model, &nothing, 0, NULL, NULL, NULL), MOE_ERR_ARGUMENT);
    CHECK_STATUS(moe_import_read_model(NULL, &nothing, 1, NULL, NULL, NULL), MOE_ERR_ARGUMENT);
    CHECK(moe_import_model(&model, FOLDER "nothing.gguf", NULL, NULL, &error) != MOE_OK);
    CHECK(moe_import_model(&model, FOLDER, NULL, NULL, &error) != MOE_OK);
}

/* ---- how folders and files turn positions into angles ---- */

/* config.json in which `with` takes the place of what stands from `from` up to `to`. */
static bytes edited(bytes b, const char *from, const char *to, const char *with) {
    const size_t begin = find(b, from, 0), end = find(b, to, begin);
    const size_t n = strlen(with);
    bytes copy;
    CHECK(begin < b.n && end < b.n, from);
    copy.n = begin + n + (b.n - end);
    copy.p = (unsigned char *)grab(copy.n, 1);
    memcpy(copy.p, b.p, begin);
    memcpy(copy.p + begin, with, n);
    memcpy(copy.p + begin + n, b.p + end, b.n - end);
    return copy;
}

/* The attention of a block when config.json says something else. */
typedef struct rotary_case {
    const char *scaling, *types;
    moe_status status;
    int kind, context;
    double factor, base, magnitude;
    int windows[2];
} rotary_case;

static void test_rotary(void) {
    static const rotary_case cases[] = {
        {"\"rope_scaling\": null", NULL, MOE_OK, MOE_ROTARY_PLAIN, 0, 0, 150000, 0, {8, 0}},
        {"\"rope_scaling\": {\"type\": \"linear\", \"factor\": 4}", NULL, MOE_OK, MOE_ROTARY_LINEAR, 0, 4, 150000, 0,
         {8, 0}},
        {"\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 7}", NULL, MOE_OK, MOE_ROTARY_PLAIN, 0, 0,
         150000, 0, {8, 0}},
        {"\"rope_scaling\": {\"type\": \"dynamic\", \"alpha\": 2, \"factor\": 1}", NULL, MOE_OK, MOE_ROTARY_PLAIN, 0, 0,
         331226.8, 0, {8, 0}},
        {"\"rotary_dim\": 8, \"rope_scaling\": {\"type\": \"dynamic\", \"alpha\": 2, \"factor\": 1}", NULL, MOE_OK,
         MOE_ROTARY_PLAIN, 0, 0, 331226.8, 0, {8, 0}}, /* by the width of a head, whatever part of it turns */
        {"\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 1, "
         "\"high_freq_factor\": 4, "
         "\"original_max_position_embeddings\": 64}", NULL, MOE_OK, MOE_ROTARY_LLAMA3, 0, 8, 150000, 0, {8, 0}},
        {"\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1,1,1,1,1,1,1,1], \"long_factor\": "
         "[2,2,2,2,2,2,2,2], \"original_max_position_embeddings\": 64}", NULL, MOE_OK, MOE_ROTARY_FACTORS, 32, 0,
         150000, 1.414214, {8, 0}},
        {"\"rope_scaling\": {\"type\": \"su\", \"short_factor\": [1,1,1,1,1,1,1,1], \"long_factor\": "
         "[2,2,2,2,2,2,2,2], \"long_mscale\": 1.5, \"original_max_position_embeddings\": 64}", NULL, MOE_OK,
         MOE_ROTARY_FACTORS, 100, 0, 150000, 1.5, {8, 0}},
        {"\"rope_parameters\": {\"rope_type\": \"longrope\", \"short_factor\": [1,1,1,1,1,1,1,1], "
         "\"long_factor\": [2,2,2,2,2,2,2,2], \"short_mscale\": 1.25, \"long_mscale\": 1.5, "
         "\"original_max_position_embeddings\": 64}", NULL, MOE_OK, MOE_ROTARY_FACTORS, 100, 0, 150000, 1.5, {8, 0}},
        {"\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1,1,1,1,1,1,1,1], "
         "\"short_mscale\": 1.25, \"long_mscale\": 1.5, \"original_max_position_embeddings\": 64}", NULL, MOE_OK,
         MOE_ROTARY_FACTORS, 64, 0, 150000, 1.25, {8, 0}},
        {"\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1,1], "
         "\"original_max_position_embeddings\": 64}", NULL, MOE_ERR_CONFIG, 0, 32, 0, 0, 0, {0, 0}},
        {"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 8, \"mscale\": 0.5, "
         "\"original_max_position_embeddings\": 64}", NULL, MOE_OK, MOE_ROTARY_YARN, 0, 8, 150000, 1.207944, {8, 0}},
        {"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 8, \"mscale\": 0.5, \"mscale_all_dim\": 0.25, "
         "\"original_max_position_embeddings\": 64}", NULL, MOE_OK, MOE_ROTARY_YARN, 0, 8, 150000, 1.049418, {8, 0}},
        {"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 8, \"mscale\": 0.5, \"mscale_all_dim\": 0.25, "
         "\"attention_factor\": 1.5, \"original_max_position_embeddings\": 64}", NULL, MOE_OK, MOE_ROTARY_YARN, 0, 8,
         150000, 1.5, {8, 0}},
        {"\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1,1,1,1,1,1,1,0], "
         "\"original_max_position_embeddings\": 64}", NULL, MOE_ERR_CONFIG, 0, 32, 0, 0, 0, {0, 0}},
        {"\"rope_scaling\": {\"type\": \"spiral\"}", NULL, MOE_ERR_UNSUPPORTED, 0, 0, 0, 0, 0, {0, 0}},
        {"\"rope_scaling\": {\"type\": \"linear\"}", NULL, MOE_ERR_NOT_FOUND, 0, 0, 0, 0, 0, {0, 0}},
        {"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": null}", NULL, MOE_ERR_NOT_FOUND, 0, 0, 0, 0, 0, {0, 0}},
        {"\"rope_scaling\": {\"type\": \"llama3\", \"low_freq_factor\": 1, \"high_freq_factor\": 4}", NULL,
         MOE_ERR_NOT_FOUND, 0, 0, 0, 0, 0, {0, 0}},
        {"\"rope_scaling\": null", "\"layer_kinds\": [\"x\"],", MOE_OK, MOE_ROTARY_PLAIN, 0, 0, 150000, 0, {8, 0}},
        {"\"rope_scaling\": null", "\"layer_types\": [\"full_attention\", \"sliding_attention\"],", MOE_OK,
         MOE_ROTARY_PLAIN, 0, 0, 150000, 0, {0, 8}},
        {"\"rope_scaling\": null", "\"layer_types\": [\"full_attention\", \"sideways\"],", MOE_ERR_UNSUPPORTED, 0, 0, 0,
         0, 0, {0, 0}}};
    const bytes file = read_file(FOLDER "gpt_oss-mxfp4/model.safetensors");
    const bytes config = read_file(FOLDER "gpt_oss-mxfp4/config.json");
    size_t i, k;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const rotary_case *c = &cases[i];
        bytes one = edited(config, "\"rope_scaling\"", ",\n \"quantization_config\"", c->scaling), both = one;
        moe_import_source sources[2];
        moe_import_options options;
        moe_imported model;
        moe_error error;
        static moe_real y[LOGITS];
        int block = 0;
        memset(&options, 0, sizeof options);
        options.context = c->context;
        error.message[0] = '\0';
        if (c->types != NULL) both = edited(one, "\"layer_types\"", "\"attention_bias\"", c->types);
        sources[0] = moe_import_memory("model.safetensors", file.p, file.n);
        sources[1] = moe_import_memory("config.json", both.p, both.n);
        CHECKF(moe_import_read_model(&model, sources, 2, &options, NULL, &error) == c->status, "%s: %s", c->scaling,
               error.message);
        for (k = 0; c->status == MOE_OK && k < model.net.n_modules; k++) {
            const moe_attention_config *a = &model.net.modules[k].attention;
            if (model.net.modules[k].kind != MOE_MODULE_ATTENTION) continue;
            CHECKF(a->rotary_scaling == c->kind && a->window == c->windows[block++ % 2], "%s: %d, %d", c->scaling,
                   a->rotary_scaling, a->window);
            CHECK_NEAR(a->rotary_base, c->base, 0.1);
            if (c->factor > 0.0) CHECK_NEAR(a->rotary_factor, c->factor, 1e-6);
            if (c->magnitude > 0.0) CHECK_NEAR(a->rotary_magnitude, c->magnitude, 1e-5);
        }
        CHECK(c->status != MOE_OK || (block == 2 && logits(&model, y)));
        moe_import_free(&model);
        if (both.p != one.p) free(both.p);
        free(one.p);
    }
    free(file.p);
    free(config.p);
}

/* ---- memory ---- */

/* Every call for memory fails once: the importer says so, and nothing stays behind. */
static void test_memory(const char *path) {
    test_heap heap;
    moe_allocator a;
    moe_imported model;
    moe_error error;
    long at;
    for (at = 1;; at++) {
        moe_status status;
        a = test_allocator(&heap, at);
        status = moe_import_model(&model, path, NULL, &a, &error);
        if (status == MOE_OK && heap.calls < at) break;
        if (status == MOE_OK) moe_import_free(&model); /* a buffer that could not double grew by less */
        else if (!CHECKF(status == MOE_ERR_MEMORY, "%s: %ld: %s", path, at, error.message)) break;
        if (!CHECKF(heap.blocks == 0 && model.owned == NULL, "%s: %ld: memory is left", path, at)) break;
    }
    CHECKF(at > 20, "%ld calls for memory", at);
    moe_import_free(&model);
    CHECK(heap.blocks == 0 && !heap.wrong_size);
}

/* ---- what a model takes beside its files ---- */

enum { WIDE = 256, MANY = 64, NARROW = 16, WORDS = 80 };

typedef struct taken {
    size_t model, work; /* bytes */
} taken;

/* One more tensor of the folder's file; its shape ends with 0s. */
static void add_tensor(char *header, size_t *data, const char *name, const int shape[3], const char *dtype,
                       size_t size) {
    int i;
    sprintf(header + strlen(header), "%c\"%s\":{\"dtype\":\"%s\",\"shape\":[", header[0] == '\0' ? '{' : ',', name,
            dtype);
    for (i = 0; i < 3 && shape[i] > 0; i++) {
        sprintf(header + strlen(header), "%s%d", i > 0 ? "," : "", shape[i]);
        size *= (size_t)shape[i];
    }
    sprintf(header + strlen(header), "],\"data_offsets\":[%lu,%lu]}", (unsigned long)*data,
            (unsigned long)(*data + size));
    *data += size;
}

/* fp8: one of the matrices of experts is FP8, with its scales. */
static void add_blocks(char *header, size_t *data, int blocks, int fp8) {
    static const struct {
        const char *name;
        int shape[3];
    } tensors[] = {{"self_attn.sinks", {4, 0, 0}},
                   {"self_attn.q_proj.weight", {WIDE, WIDE, 0}},
                   {"self_attn.q_proj.bias", {WIDE, 0, 0}},
                   {"self_attn.k_proj.weight", {WIDE, WIDE, 0}},
                   {"self_attn.k_proj.bias", {WIDE, 0, 0}},
                   {"self_attn.v_proj.weight", {WIDE, WIDE, 0}},
                   {"self_attn.v_proj.bias", {WIDE, 0, 0}},
                   {"self_attn.o_proj.weight", {WIDE, WIDE, 0}},
                   {"self_attn.o_proj.bias", {WIDE, 0, 0}},
                   {"mlp.router.weight", {MANY, WIDE, 0}},
                   {"mlp.router.bias", {MANY, 0, 0}},
                   {"mlp.experts.gate_up_proj", {MANY, WIDE, 2 * (int)NARROW}},
                   {"mlp.experts.gate_up_proj_bias", {MANY, 2 * (int)NARROW, 0}},
                   {"mlp.experts.down_proj", {MANY, NARROW, WIDE}},
                   {"mlp.experts.down_proj_bias", {MANY, WIDE, 0}},
                   {"input_layernorm.weight", {WIDE, 0, 0}},
                   {"post_attention_layernorm.weight", {WIDE, 0, 0}}};
    static const int words[3] = {WORDS, WIDE, 0}, norm[3] = {WIDE, 0, 0};
    char name[80];
    size_t i;
    int block;
    for (block = 0; block < blocks; block++)
        for (i = 0; i < sizeof tensors / sizeof *tensors; i++) {
            sprintf(name, "model.layers.%d.%s", block, tensors[i].name);
            if (!fp8 || strcmp(tensors[i].name, "mlp.experts.down_proj") != 0) {
                add_tensor(header, data, name, tensors[i].shape, "BF16", 2);
                continue;
            }
            add_tensor(header, data, name, tensors[i].shape, "F8_E4M3", 1);
            strcat(name, "_scale_inv");
            add_tensor(header, data, name, tensors[i].shape, "F32", 4);
        }
    add_tensor(header, data, "model.embed_tokens.weight", words, "BF16", 2);
    add_tensor(header, data, "lm_head.weight", words, "BF16", 2);
    add_tensor(header, data, "model.norm.weight", norm, "BF16", 2);
    strcat(header, "}");
}

/* A folder with a model of gpt-oss, all zeros. fp8: it is refused. */
static taken taken_by(int blocks, int fp8) {
    enum { HEADER = 1 << 14, TOKENS = 64 };
    static const char config[] =
        "{\"model_type\":\"gpt_oss\",\"vocab_size\":80,\"hidden_size\":256,\"num_attention_heads\":4,\"head_dim\":64,"
        "\"num_key_value_heads\":4,\"rms_norm_eps\":1e-05,\"num_experts_per_tok\":4,\"num_local_experts\":64,"
        "\"intermediate_size\":16,\"sliding_window\":8,\"swiglu_limit\":7.0,\"attention_bias\":true,"
        "\"num_hidden_layers\":%d}";
    char *header = (char *)grab(HEADER, 1), settings[sizeof config + 8];
    size_t data = 0, cache, length, i;
    taken t = {0, 0};
    unsigned char *file;
    test_heap heap;
    const moe_allocator a = test_allocator(&heap, 0);
    moe_import_source sources[2];
    moe_imported model;
    moe_error error;
    add_blocks(header, &data, blocks, fp8);
    sprintf(settings, config, blocks);
    length = strlen(header);
    file = (unsigned char *)grab(8 + length + data, 1);
    for (i = 0; i < 4; i++) file[i] = (unsigned char)(length >> 8 * i & 255u);
    memcpy(file + 8, header, length);
    sources[0] = moe_import_memory("model.safetensors", file, 8 + length + data);
    sources[1] = moe_import_memory("config.json", settings, strlen(settings));
    if (fp8) {
        CHECK_STATUS(moe_import_read_model(&model, sources, 2, NULL, &a, &error), MOE_ERR_UNSUPPORTED);
        CHECK(strstr(error.message, "'model.layers.0.mlp.experts.down_proj': F8_E4M3 cannot be transposed") != NULL,
              error.message);
        CHECK(heap.blocks == 0);
    } else if (CHECK(moe_import_read_model(&model, sources, 2, NULL, &a, &error) == MOE_OK, error.message)) {
        t.model = heap.bytes;
        for (i = 0; i < model.net.n_modules; i++) {
            const moe_layer *layer = &model.net.modules[i].layer;
            if (model.net.modules[i].kind != MOE_MODULE_MIXTURE) continue;
            CHECK(layer->tensors[MOE_ROUTER_WEIGHT] == NULL && layer->tensors[MOE_EXPERTS_UP_BIAS] == NULL);
        }
        model.net.last_only = 1;
        CHECK_STATUS(moe_net_decode_size(&model.net, TOKENS, TOKENS, &cache, &t.work, &error), MOE_OK);
        t.work /= TOKENS;
        moe_import_free(&model);
    }
    free(file);
    free(header);
    return t;
}

/* Routers and the biases of experts, in 16 bits, stay in the file, and of a block's workspace only
   its routing is its own. */
static void test_taken(void) {
    const size_t records = 6 * (int)MANY * sizeof(moe_external) + 10 * sizeof(moe_module);
    const size_t numbers = 12 * (int)WIDE * sizeof(moe_real);
    const taken few = taken_by(2, 0), more = taken_by(6, 0);
    (void)taken_by(1, 1);
    CHECKF((more.model - few.model) / 4 < records + numbers, "%lu bytes of a block, %lu of them for records",
           (unsigned long)(more.model - few.model) / 4, (unsigned long)records);
    CHECKF((more.work - few.work) / 4 < 4 * (int)MANY * sizeof(moe_real) + 512, "%lu bytes of a token and a block",
           (unsigned long)(more.work - few.work) / 4);
}

/* ---- what is refused ---- */

/* A file in which a text is another one, and what is said of it. */
typedef struct refusal {
    const char *text, *with;
    moe_status status;
    const char *says;
} refusal;

static void refuse(bytes b, const char *name, const bytes *config, const refusal *r) {
    bytes changed = find(b, r->text, 0) < b.n ? replaced(b, r->text, r->with) : b;
    bytes settings = config != NULL ? *config : b;
    moe_import_source sources[2];
    moe_imported model;
    moe_error error;
    moe_status status;
    error.message[0] = '\0';
    if (config != NULL && changed.p == b.p) settings = replaced(*config, r->text, r->with);
    sources[0] = moe_import_memory(name, changed.p, changed.n);
    sources[1] = moe_import_memory("config.json", settings.p, settings.n);
    status = moe_import_read_model(&model, sources, config != NULL ? 2 : 1, NULL, NULL, &error);
    CHECKF(status == r->status && strstr(error.message, r->says) != NULL, "%s -> %s: %s: %s, wanted: %s", r->text,
           r->with, moe_status_text(status), error.message, r->says);
    moe_import_free(&model);
    if (changed.p != b.p) free(changed.p);
    if (config != NULL && settings.p != config->p) free(settings.p);
}

static void test_refusals_gguf(void) {
    static const refusal rows[] = {
        {"llama", "lamma", MOE_ERR_UNSUPPORTED, "lamma"},
        {"blk.1.attn_q.weight", "blk.1.attn_z.weight", MOE_ERR_NOT_FOUND, "attn_q.weight': missing"},
        {"blk.1.attn_norm.weight", "blk.1.attn_nurm.weight", MOE_ERR_NOT_FOUND, "attn_norm.weight': missing"},
        {"blk.1.ffn_norm.weight", "blk.1.ffn_nurm.weight", MOE_ERR_NOT_FOUND, "ffn_norm.weight': missing"},
        {"blk.1.attn_q.weight", "blk.0.attn_q.weight", MOE_ERR_FORMAT, "blk.0.attn_q.weight': duplicates"},
        {"blk.1.attn_q.weight", "blk.7.attn_q.weight", MOE_ERR_UNSUPPORTED, "blk.7.attn_q.weight"},
        {"blk.1.attn_q.weight", "blk.x.attn_q.weight", MOE_ERR_UNSUPPORTED, "blk.x.attn_q.weight"},
        {"blk.1.attn_q.weight", "blk.1xattn_q.weight", MOE_ERR_UNSUPPORTED, "blk.1xattn_q.weight"},
        {"blk.1.attn_q.weight", "blk.01.ttn_q.weight", MOE_ERR_UNSUPPORTED, "blk.01.ttn_q.weight"},
        {"blk.1.attn_q.weight", "blk.123456.q.weight", MOE_ERR_UNSUPPORTED, "blk.123456.q.weight"},
        {"blk.1.attn_k.weight", "blk.1.attn_q.weight", MOE_ERR_FORMAT, "duplicates"},
        {"blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_inz.weight", MOE_ERR_UNSUPPORTED,
         "'blk.0.ffn_gate_inz.weight': mixtral has no tensor of this name"},
        {"blk.1.ffn_up_exps.weight", "blk.1.ffn_up_expz.weight", MOE_ERR_UNSUPPORTED, "ffn_up_expz"},
        {"output_norm.weight", "output_nurm.weight", MOE_ERR_UNSUPPORTED, "output_nurm"},
        {"llama.block_count", "llama.block_cxunt", MOE_ERR_NOT_FOUND, "block_count is missing"},
        {"llama.embedding_length", "llama.embedding_lxngth", MOE_ERR_NOT_FOUND, "embedding_length is missing"},
        {"llama.attention.layer_norm_rms_epsilon", "llama.attention.layer_norm_rms_epsilun", MOE_ERR_NOT_FOUND,
         "epsilon is missing"},
        {"llama.attention.head_count_kv", "llama.attention.head_count_kx", MOE_ERR_SHAPE, "attn_k.weight': the shape"}};
    const bytes b = read_file(GGUF);
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) refuse(b, NULL, NULL, &rows[i]);
    free(b.p);
}

static void test_refusals_oss(void) {
    static const refusal rows[] = {
        {"yarn", "spin", MOE_ERR_UNSUPPORTED, "rope.scaling.type = spin"},
        {"yarn", "none", MOE_OK, ""},
        {"attention.sliding_window", "attention.sliding_windoz", MOE_ERR_NOT_FOUND, "sliding_window is missing"},
        {"gpt-oss.rope.scaling.type", "gpt-oss.rope.scaling.typo", MOE_OK, ""},
        {"blk.1.attn_sinks.weight", "blk.1.attn_sunks.weight", MOE_ERR_NOT_FOUND, "attn_sinks.weight': missing"},
        {"blk.1.post_attention_norm.weight", "blk.1.post_attention_nurm.weight", MOE_ERR_NOT_FOUND, "missing"},
        {"blk.1.attn_output.bias", "blk.1.attn_outpit.bias", MOE_ERR_NOT_FOUND, "attn_output.bias': missing"},
        {"blk.1.attn_q.bias", "blk.1.attn_p.bias", MOE_ERR_NOT_FOUND, "attn_q.bias': missing"},
        {"blk.1.ffn_up_exps.bias", "blk.1.ffn_up_expz.bias", MOE_ERR_UNSUPPORTED, "ffn_up_expz"}};
    const bytes b = read_file(GGUF_OSS);
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) refuse(b, NULL, NULL, &rows[i]);
    free(b.p);
}

static void test_refusals_folder(void) {
    static const refusal rows[] = {
        {"\"deepseek_v3\"", "\"deepseek_v9\"", MOE_ERR_UNSUPPORTED, "deepseek_v9"},
        {"\"hidden_size\": 48", "\"hidden_size\": 40", MOE_ERR_SHAPE, "the shape must be"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", MOE_ERR_NOT_FOUND, "missing in the file"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1", MOE_ERR_UNSUPPORTED, "model.layers.1"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": x", MOE_ERR_FORMAT, "config.json"},
        {"\"rms_norm_eps\"", "\"rms_norm_epz\"", MOE_ERR_NOT_FOUND, "rms_norm_eps is missing"},
        {"\"yarn\"", "\"yurn\"", MOE_ERR_UNSUPPORTED, "yurn"},
        {"\"q_lora_rank\": 20", "\"q_lora_rank\": 21", MOE_ERR_SHAPE, "q_a_proj"},
        {"\"kv_lora_rank\": 24", "\"kv_lora_rank\": -4", MOE_ERR_CONFIG, "kv_lora_rank = -4"},
        {"model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.uq_proj.weight", MOE_ERR_NOT_FOUND, "up_proj"},
        {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gaze.weight", MOE_ERR_UNSUPPORTED,
         "'model.layers.1.mlp.gaze.weight': deepseek_v3 has no tensor of this name"},
        {"model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.o_prox.weight", MOE_ERR_NOT_FOUND,
         "o_proj.weight': missing"},
        {"lm_head.weight", "lm_head.weighs", MOE_ERR_UNSUPPORTED, "weighs"}};
    const bytes b = read_file(FOLDER "deepseek_v3-bf16/model.safetensors");
    const bytes config = read_file(FOLDER "deepseek_v3-bf16/config.json");
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) refuse(b, "model.safetensors", &config, &rows[i]);
    free(b.p);
    free(config.p);
}

/* Tensors that other architectures have are refused, not left out. */
static void test_foreign(void) {
    static const char *const names[] = {
        "model.layers.0.self_attn.q_proj.bias",        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.0.self_attn.v_proj.bias",        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",      "model.layers.0.self_attn.k_norm.weight",
        "model.layers.0.self_attn.q_layernorm.weight", "model.layers.0.self_attn.key_layernorm.weight",
        "model.layers.0.self_attn.k_proj.weight",      "model.layers.0.self_attn.out_proj.weight",
        "model.layers.0.self_attn.sinks",              "model.layers.0.conv.in_proj.weight",
        "model.layers.0.input_layernorm.bias",         "model.layers.0.post_attention_layernorm.bias",
        "model.layers.0.operator_norm.weight",         "model.layers.0.ffn_norm.weight",
        "model.layers.0.conv.conv.weight",             "model.embedding_norm.weight",
        "model.norm.bias",                             "lm_head.bias"};
    const bytes file = read_file(FOLDER "deepseek_v3-bf16/model.safetensors");
    const bytes config = read_file(FOLDER "deepseek_v3-bf16/config.json");
    size_t i, k, length = 0;
    for (k = 8; k-- > 0;) length = length << 8 | file.p[k];
    for (i = 0; i < sizeof names / sizeof *names; i++) {
        const size_t end = file.n - 8 - length; /* of the data, where the tensor's two bytes are added */
        bytes more;
        size_t header;
        moe_import_source sources[2];
        moe_imported model;
        moe_error error;
        moe_status status;
        more.p = (unsigned char *)grab(file.n + 300, 1);
        sprintf((char *)more.p + 8, "{\"%s\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[%lu,%lu]},", names[i],
                (unsigned long)end, (unsigned long)end + 2);
        header = strlen((const char *)more.p + 8);
        memcpy(more.p + 8 + header, file.p + 9, file.n - 9); /* without the first brace */
        more.n = file.n + header - 1 + 2;
        for (k = 0; k < 8; k++) more.p[k] = (unsigned char)((length + header - 1) >> 8 * k & 255u);
        sources[0] = moe_import_memory("model.safetensors", more.p, more.n);
        sources[1] = moe_import_memory("config.json", config.p, config.n);
        error.message[0] = '\0';
        status = moe_import_read_model(&model, sources, 2, NULL, NULL, &error);
        CHECKF(status == MOE_ERR_UNSUPPORTED && strstr(error.message, names[i]) != NULL &&
                   strstr(error.message, "has no such tensor") != NULL,
               "%s: %s: %s", names[i], moe_status_text(status), error.message);
        moe_import_free(&model);
        free(more.p);
    }
    free(file.p);
    free(config.p);
}

/* Each setting has bounds, and messages name what is beyond. */
static void test_bounds(void) {
    static const char *const rows[][2] = {{"kv_lora_rank", "0"},
                                          {"num_hidden_layers", "0"},
                                          {"num_hidden_layers", "1025"},
                                          {"max_position_embeddings", "16777218"},
                                          {"num_attention_heads", "65537"},
                                          {"qk_nope_head_dim", "0"},
                                          {"qk_rope_head_dim", "65537"},
                                          {"v_head_dim", "0"},
                                          {"rms_norm_eps", "1.5"},
                                          {"rope_theta", "0.0009"},
                                          {"factor", "1000001"},
                                          {"original_max_position_embeddings", "0"},
                                          {"beta_fast", "1000001"},
                                          {"beta_slow", "1000001"},
                                          {"mscale", "1000001"},
                                          {"mscale", "-1000001"}};
    const bytes b = read_file(FOLDER "deepseek_v3-bf16/model.safetensors");
    const bytes config = read_file(FOLDER "deepseek_v3-bf16/config.json");
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char from[64], with[64], says[64];
        bytes changed;
        moe_import_source sources[2];
        moe_imported model;
        moe_error error;
        moe_status status;
        sprintf(from, "\"%s\"", rows[i][0]);
        sprintf(with, "\"%s\": %s", rows[i][0], rows[i][1]);
        sprintf(says, "%s = %s", rows[i][0], rows[i][1]);
        changed = edited(config, from, ",", with);
        sources[0] = moe_import_memory("model.safetensors", b.p, b.n);
        sources[1] = moe_import_memory("config.json", changed.p, changed.n);
        status = moe_import_read_model(&model, sources, 2, NULL, NULL, &error);
        CHECKF(status == MOE_ERR_CONFIG && strstr(error.message, says) != NULL, "%s: %s", says, error.message);
        if (status == MOE_OK) moe_import_free(&model);
        free(changed.p);
    }
    free(b.p);
    free(config.p);
}

/* ---- files from strangers ---- */

/* Imports the sources, and runs the model where it is one; whether it is. */
static int import_anything(const moe_import_source *sources, size_t n) {
    static moe_real y[LOGITS];
    moe_imported model;
    moe_error error;
    const moe_status status = moe_import_read_model(&model, sources, n, NULL, NULL, &error);
    if (status == MOE_OK && model.vocabulary <= 128) (void)logits(&model, y);
    if (status != MOE_OK) CHECK(model.owned == NULL && error.code == status && error.message[0] != '\0');
    moe_import_free(&model);
    return status == MOE_OK;
}

/* Whatever single bytes of a file's first `header` bytes are: the importer refuses, or the model
   runs. The file is source `which` of n; each step skips up to `step` bytes. */
static void test_bytes(const char *const *paths, size_t n, size_t which, size_t header, size_t step) {
    static const char *const names[] = {"model.safetensors", "config.json"};
    moe_import_source sources[2];
    bytes files[2];
    moe_rng rng;
    size_t at, i, made = 0, tried = 0;
    moe_rng_seed(&rng, 7);
    for (i = 0; i < n; i++) {
        files[i] = read_file(paths[i]);
        sources[i] = moe_import_memory(names[i], files[i].p, files[i].n);
    }
    if (header > files[which].n) header = files[which].n;
    for (at = 0; at < header; at += 1 + (size_t)(moe_rng_next(&rng) % step), tried++) {
        unsigned char *byte = files[which].p + at, before = *byte;
        *byte = (unsigned char)(moe_rng_next(&rng) % 4 == 0 ? '0' + moe_rng_next(&rng) % 10
                                                            : before ^ 1u << moe_rng_next(&rng) % 8);
        made += (size_t)import_anything(sources, n);
        *byte = before;
    }
    CHECKF(tried > 20 && made < tried, "%lu of %lu files are models", (unsigned long)made, (unsigned long)tried);
    for (at = 0; at < files[which].n; at += 1 + files[which].n / 50) {
        sources[which].size = at;
        CHECK(!import_anything(sources, n));
    }
    for (i = 0; i < n; i++) free(files[i].p);
}

/* ---- small models of every architecture ---- */

typedef struct seed {
    bytes all;
    moe_import_source sources[2];
    size_t n;
} seed;

/* An input of tests/fuzz/fuzz_file.c: sizes of 16 bits and as many bytes, twice nothing, then the
   file and config.json. */
static void read_seed(seed *s, const char *arch, int folder) {
    static const char *const names[] = {"model.safetensors", "config.json"};
    char path[100];
    size_t at = 8, size;
    sprintf(path, "tests/fuzz/corpus/files/whole-%s-%s", arch, folder ? "folder" : "file");
    s->all = read_file(path);
    for (s->n = 0; at + 2 <= s->all.n && s->n < 2; at += 2 + size, s->n++) {
        size = (size_t)s->all.p[at] | (size_t)s->all.p[at + 1] << 8;
        s->sources[s->n] = moe_import_memory(folder ? names[s->n] : NULL, s->all.p + at + 2, size);
    }
}

/* As test_memory, from sources. */
static void test_seed_memory(const seed *s, const char *name) {
    test_heap heap;
    moe_imported model;
    moe_error error;
    long at;
    for (at = 1;; at++) {
        moe_allocator a = test_allocator(&heap, at);
        const moe_status status = moe_import_read_model(&model, s->sources, s->n, NULL, &a, &error);
        moe_import_free(&model);
        if (!CHECKF(heap.blocks == 0 && !heap.wrong_size, "%s: %ld: memory is left", name, at)) break;
        if (status == MOE_OK && heap.calls < at) break;
        if (!CHECKF(status == MOE_ERR_MEMORY || status == MOE_OK, "%s: %ld: %s", name, at, error.message)) break;
    }
}

/* What config.json says last counts. */
static void test_seed_settings(void) {
    static const struct {
        const char *arch, *last;
        moe_status status;
        const char *says;
    } rows[] = {{"llama", "\"tie_word_embeddings\": true", MOE_OK, ""},
                {"llama", "\"tie_word_embeddings\": 0", MOE_ERR_NOT_FOUND, "lm_head.weight': missing"},
                {"llama", "\"head_dim\": null", MOE_OK, ""},
                {"granitemoe", "\"tie_word_embeddings\": true", MOE_OK, ""},
                {"lfm2moe", "\"tie_word_embeddings\": false", MOE_ERR_NOT_FOUND, "lm_head.weight': missing"},
                {"llama", "\"hidden_size\": 8.5", MOE_ERR_CONFIG, "must be an integer"},
                {"llama", "\"hidden_size\": -8.5", MOE_ERR_CONFIG, "must be an integer"},
                {"llama", "\"num_attention_heads\": []", MOE_ERR_CONFIG, "heads = a list: expected a number"},
                {"llama", "\"num_attention_heads\": [1, \"x\"]", MOE_OK, ""}, /* it has one block */
                {"llama", "\"num_attention_heads\": [\"x\"]", MOE_ERR_CONFIG, "heads = x: expected a number"},
                {"granitemoe", "\"embedding_multiplier\": [1, 12]", MOE_ERR_CONFIG, "r = a list: expected a number"},
                {"granitemoe", "\"model_type\": [\"granitemoe\", \"olmoe\"]", MOE_ERR_UNSUPPORTED, "model_type = ''"},
                {"llama", "\"time_step_limit\": [0.0, Infinity], \"a\": NaN, \"b\": -Infinity", MOE_OK, ""},
                {"llama", "\"a\": nan", MOE_ERR_FORMAT, "a value is expected"},
                {"llama", "\"rms_norm_eps\": NaN", MOE_ERR_CONFIG, "rms_norm_eps = NaN: expected a number"},
                {"llama", "\"rms_norm_eps\": Infinity", MOE_ERR_CONFIG, "rms_norm_eps = Infinity: "},
                {"llama", "\"hidden_size\": \"x\"", MOE_ERR_CONFIG, "expected a number"},
                {"llama", "\"hidden_size\": {}", MOE_ERR_CONFIG, "a list: expected a number"},
                {"llama", "\"hidden_size\": 1e30", MOE_ERR_CONFIG, "must be an integer"},
                {"llama", "\"hidden_size\": -1e30", MOE_ERR_CONFIG, "must be an integer"},
                {"llama", "\"rms_norm_eps\": 2", MOE_ERR_CONFIG, "rms_norm_eps = 2: must be"},
                {"llama", "\"num_key_value_heads\": 0", MOE_ERR_CONFIG, "must be a multiple"},
                {"llama", "\"num_attention_heads\": 0", MOE_ERR_CONFIG, "must be a multiple"},
                {"llama", "\"num_attention_heads\": null", MOE_ERR_NOT_FOUND, "num_attention_heads is missing"},
                {"deepseek2", "\"kv_lora_rank\": null", MOE_ERR_NOT_FOUND, "config.json: kv_lora_rank is missing"},
                {"deepseek2", "\"qk_rope_head_dim\": null", MOE_ERR_NOT_FOUND, "qk_rope_head_dim is missing"},
                {"lfm2moe", "\"conv_L_cache\": null", MOE_ERR_NOT_FOUND, "config.json: conv_L_cache is missing"},
                {"deepseek2", "\"n_group\": -4", MOE_ERR_CONFIG,
                 "n_group = -4: expected a number that is not negative"},
                {"deepseek2", "\"n_group\": -0", MOE_OK, ""},
                {"dots1", "\"n_shared_experts\": -1", MOE_ERR_CONFIG, "n_shared_experts = -1: expected a number that"},
                {"llama", "\"tie_word_embeddings\": 0.0", MOE_ERR_NOT_FOUND, "lm_head.weight': missing"},
                {"llama", "\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2}", MOE_OK, ""},
                {"llama", "\"rope_scaling\": {\"type\": \"longrope\"}", MOE_ERR_CONFIG, "positive numbers"},
                {"llama", "\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": []}", MOE_ERR_CONFIG,
                 "positive numbers"},
                {"llama", "\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [0, 0, 0, 0]}",
                 MOE_ERR_CONFIG, "positive numbers"},
                {"llama", "\"quantization_config\": {\"quant_method\": \"gptq\"}", MOE_ERR_UNSUPPORTED,
                 "quantization_config"},
                {"llama", "\"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"e5m2\"}",
                 MOE_ERR_UNSUPPORTED, "quantization_config"},
                {"llama", "\"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"e4m3\"}", MOE_OK, ""},
                {"llama", "\"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"float8_e4m3fn\"}", MOE_OK,
                 ""},
                {"llama", "\"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": 4}", MOE_ERR_UNSUPPORTED,
                 "quantization_config"},
                {"gpt-oss", "\"experts_per_token\": 3", MOE_OK, ""}, /* it has one expert */
                {"gpt-oss", "\"num_experts_per_tok\": 3", MOE_ERR_CONFIG, "top_k"},
                {"qwen2moe", "\"use_sliding_window\": true, \"sliding_window\": 2, \"max_window_layers\": 0", MOE_OK,
                 ""},
                {"qwen2moe", "\"use_sliding_window\": true, \"sliding_window\": 2, \"max_window_layers\": 9", MOE_OK,
                 ""},
                {"llama4", "\"attn_temperature_tuning\": false, \"use_qk_norm\": false", MOE_OK, ""},
                {"llama4", "\"attention_chunk_size\": null, \"layer_types\": null", MOE_OK, ""},
                {"deepseek2", "\"rope_interleave\": false", MOE_OK, ""},
                {"deepseek2", "\"n_group\": 3, \"topk_group\": 2, \"topk_method\": \"group_limited_greedy\"",
                 MOE_ERR_CONFIG, "groups"},
                {"dots1", "\"n_shared_experts\": 0", MOE_OK, ""},
                {"olmoe", "\"hidden_act\": \"relu\"", MOE_ERR_UNSUPPORTED, "hidden_act"}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char config[8000];
        moe_imported model;
        moe_error error;
        moe_status status;
        seed s;
        read_seed(&s, rows[i].arch, 1);
        sprintf(config, "%.*s,%s}", (int)s.sources[1].size - 1, (const char *)s.sources[1].ctx, rows[i].last);
        s.sources[1] = moe_import_memory("config.json", config, strlen(config));
        error.message[0] = '\0';
        status = moe_import_read_model(&model, s.sources, 2, NULL, NULL, &error);
        CHECKF(status == rows[i].status && strstr(error.message, rows[i].says) != NULL, "%s: %s: %s: %s", rows[i].arch,
               rows[i].last, moe_status_text(status), error.message);
        moe_import_free(&model);
        free(s.all.p);
    }
}

/* A small folder whose config.json has `with` instead of `text` (NULL: as it is) and ends with
   `last`. */
static moe_status import_seed(moe_imported *model, const char *arch, const char *text, const char *with,
                              const char *last, moe_error *error) {
    char config[8000];
    seed s;
    bytes settings, changed;
    moe_status status;
    read_seed(&s, arch, 1);
    settings.p = s.all.p + ((const unsigned char *)s.sources[1].ctx - s.all.p);
    settings.n = (size_t)s.sources[1].size;
    changed = text != NULL ? replaced(settings, text, with) : settings;
    sprintf(config, "%.*s%s%s}", (int)changed.n - 1, (const char *)changed.p, last[0] != '\0' ? "," : "", last);
    s.sources[1] = moe_import_memory("config.json", config, strlen(config));
    error->message[0] = '\0';
    status = moe_import_read_model(model, s.sources, 2, NULL, NULL, error);
    if (changed.p != settings.p) free(changed.p);
    free(s.all.p); /* the settings of the modules, which are looked at, are copies */
    return status;
}

/* The attention of block `block`; NULL: it has none. */
static const moe_attention_config *attention_of(const moe_imported *model, int block) {
    size_t k;
    for (k = 0; k < model->net.n_modules; k++)
        if (model->net.modules[k].kind == MOE_MODULE_ATTENTION && block-- == 0) return &model->net.modules[k].attention;
    return NULL;
}

/* A key that is absent means what the family's own program takes. */
static void test_absent(void) {
    static const struct {
        const char *arch, *key, *hidden, *said;
        moe_status status;
    } rows[] = {
        {"llama", "\"rope_theta\"", "\"rope_thetz\"", "\"rope_theta\": 1e6", MOE_OK},
        {"olmoe", "\"rope_theta\"", "\"rope_thetz\"", "\"rope_theta\": 1e4", MOE_OK},
        {"lfm2moe", "\"rope_theta\"", "\"rope_thetz\"", "\"rope_theta\": 1e6", MOE_OK},
        {"phimoe", "\"rope_theta\"", "\"rope_thetz\"", "\"rope_theta\": 1e6", MOE_OK},
        {"minimax-m2", "\"rope_theta\"", "\"rope_thetz\"", "\"rope_theta\": 5e6", MOE_OK},
        {"llama4", "\"rope_theta\"", "\"rope_thetz\"", "\"rope_theta\": 5e5", MOE_OK},
        {"ernie4_5-moe", "\"rope_theta\"", "\"rope_thetz\"", "\"rope_theta\": 5e5", MOE_OK},
        {"gpt-oss", "\"rope_theta\"", "\"rope_thetz\"", "\"rope_theta\": 150000", MOE_OK},
        {"gpt-oss", "\"sliding_window\"", "\"sliding_windoz\"", "\"sliding_window\": 128", MOE_OK},
        {"gpt-oss", NULL, NULL, "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 32, \"truncate\": false, "
         "\"original_max_position_embeddings\": 4096}", MOE_OK},
        {"gpt-oss", NULL, NULL, "\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 32, \"truncate\": false, "
         "\"original_max_position_embeddings\": 4096}", MOE_OK},
        {"granitemoe", "\"attention_multiplier\"", "\"attention_multiplies\"", "\"attention_multiplier\": 1", MOE_OK},
        {"llama4", "\"attention_chunk_size\"", "\"attention_chunk_sizz\"", "\"attention_chunk_size\": 8192", MOE_OK},
        {"phimoe", "\"max_position_embeddings\": 1024", "\"max_pozition_embeddings\": 1024",
         "\"max_position_embeddings\": 131072", MOE_OK},
        {"glm4moe", "\"partial_rotary_factor\"", "\"partial_rotary_factos\"", "\"partial_rotary_factor\": 0.5",
         MOE_ERR_CONFIG}}; /* heads of 10 */
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        moe_imported absent, said;
        moe_error error, why;
        const moe_status status = import_seed(&absent, rows[i].arch, rows[i].key, rows[i].hidden, "", &error);
        const moe_attention_config *a, *b;
        int block = 0;
        CHECKF(status == rows[i].status && import_seed(&said, rows[i].arch, NULL, NULL, rows[i].said, &why) == status &&
                   strcmp(error.message, why.message) == 0, "%s: %s: %s / %s", rows[i].arch, rows[i].said,
               error.message, why.message);
        for (; (a = attention_of(&absent, block)) != NULL && (b = attention_of(&said, block)) != NULL; block++)
            CHECKF(memcmp(a, b, sizeof *a) == 0, "%s, block %d: %s", rows[i].arch, block, rows[i].said);
        CHECK(status != MOE_OK || block > 0);
        moe_import_free(&absent);
        moe_import_free(&said);
    }
}

/* Which blocks have a sliding window, and which rotate (llama4). */
static void test_windows(void) {
    static const struct {
        const char *arch, *last;
        int windows[2], rotary[2];
    } rows[] = {
        {"olmoe", "\"model_type\": \"qwen3_moe\", \"use_sliding_window\": true, \"sliding_window\": 3, "
         "\"max_window_layers\": 9", {3, 3}, {1, 1}},
        {"olmoe", "\"model_type\": \"qwen3_moe\", \"use_sliding_window\": false, \"sliding_window\": 3", {0, 0},
         {1, 1}},
        {"olmoe", "\"use_sliding_window\": true, \"sliding_window\": 3", {0, 0}, {1, 1}},
        {"dots1", "\"sliding_window\": 3, \"max_window_layers\": 1", {0, 3}, {1, 1}},
        {"dots1", "\"sliding_window\": 3", {0, 0}, {1, 1}},
        {"dots1", "\"sliding_window\": null, \"max_window_layers\": 0", {0, 0}, {1, 1}},
        {"phimoe", "\"sliding_window\": 3", {3, 3}, {1, 1}},
        {"llama4", "\"no_rope_layers\": [], \"layer_types\": null", {0, 0}, {1, 1}},
        {"llama4", "\"no_rope_layers\": [1, 0], \"layer_types\": null", {0, 0}, {1, 0}},
        {"llama4", "\"no_rope_layers\": [], \"layer_types\": null, \"no_rope_layer_interval\": 2", {0, 0}, {1, 0}}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        moe_imported model;
        moe_error error;
        int block;
        CHECKF(import_seed(&model, rows[i].arch, NULL, NULL, rows[i].last, &error) == MOE_OK, "%s: %s: %s",
               rows[i].arch, rows[i].last, error.message);
        for (block = 0; block < 2; block++) {
            const moe_attention_config *a = attention_of(&model, block);
            CHECKF(a != NULL && a->window == rows[i].windows[block] && a->rotary == rows[i].rotary[block],
                   "%s: %s: block %d", rows[i].arch, rows[i].last, block);
        }
        moe_import_free(&model);
    }
}

/* A setting that is a list, one element per block, for a layer of that block. */
static void test_layer_lists(void) {
    static const char *const prefixes[] = {"model.layers.0", "model.layers.1.mlp"};
    size_t i;
    for (i = 0; i < 2; i++) {
        char config[2000];
        moe_layer layer;
        moe_error error;
        moe_status status;
        seed s;
        read_seed(&s, "hunyuan-moe", 1);
        sprintf(config, "%.*s, \"moe_topk\": [1, 2]}", (int)s.sources[1].size - 1, (const char *)s.sources[1].ctx);
        s.sources[1] = moe_import_memory("config.json", config, strlen(config));
        error.message[0] = '\0';
        status = moe_import_read(&layer, s.sources, 2, prefixes[i], NULL, NULL, &error);
        CHECKF(status == (i == 0 ? MOE_OK : MOE_ERR_CONFIG), "%s: %s", prefixes[i], error.message); /* one expert */
        if (status == MOE_OK) {
            CHECK(layer.config.router.top_k == 1);
            moe_layer_free(&layer);
        }
        free(s.all.p);
    }
}

/* A GGUF file in which a tensor has one more outer dimension of 1 (more = 1), or one less. A key
   makes the header longer by a multiple of the alignment together with it. */
static bytes with_dimension(bytes b, const char *name, int more) {
    const size_t key = more ? 24 : 40, text = key - 8 - 4 - 1;
    const size_t at = find(b, name, 0) + strlen(name), end = at + 4 + 8 * (size_t)b.p[at];
    bytes copy;
    CHECK(end < b.n && (more || b.p[end - 8] == 1), name);
    copy.n = b.n + 32;
    copy.p = (unsigned char *)grab(copy.n, 1);
    memcpy(copy.p, b.p, 24);
    copy.p[16] = (unsigned char)(copy.p[16] + 1);
    copy.p[24] = (unsigned char)text;
    memset(copy.p + 32, 'k', text);
    memcpy(copy.p + 24 + key, b.p + 24, end - 24);
    copy.p[at + key] = (unsigned char)(more ? b.p[at] + 1 : b.p[at] - 1);
    if (more) copy.p[end + key] = 1;
    memcpy(copy.p + end + key + 8 - (more ? 0 : 16), b.p + end, b.n - end);
    return copy;
}

/* llama.cpp's converter writes [1,H] where its quantizer writes [H]. */
static void test_dimensions(void) {
    static const struct {
        const char *arch, *name;
        int more;
        moe_status status;
    } rows[] = {{"qwen2moe", "blk.0.ffn_gate_inp_shexp.weight", 1, MOE_OK},
                {"ernie4_5-moe", "blk.1.exp_probs_b.bias", 1, MOE_OK},
                {"qwen2moe", "blk.0.attn_norm.weight", 1, MOE_OK},
                {"qwen2moe", "blk.0.attn_q.bias", 1, MOE_OK},
                {"qwen2moe", "output_norm.weight", 1, MOE_OK},
                {"qwen2moe", "blk.0.ffn_gate_inp.weight", 0, MOE_OK},
                {"qwen2moe", "blk.0.ffn_gate_exps.weight", 0, MOE_OK},
                {"qwen2moe", "blk.0.ffn_down_exps.weight", 0, MOE_OK}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        static moe_real of_file[LOGITS], of_changed[LOGITS];
        moe_imported model;
        moe_error error;
        moe_status status;
        moe_import_source source;
        bytes b, changed;
        seed s;
        read_seed(&s, rows[i].arch, 0);
        b.p = s.all.p + ((const unsigned char *)s.sources[0].ctx - s.all.p);
        b.n = (size_t)s.sources[0].size;
        if (CHECK(moe_import_read_model(&model, s.sources, 1, NULL, NULL, &error) == MOE_OK, error.message))
            CHECK(logits(&model, of_file));
        moe_import_free(&model);
        changed = with_dimension(b, rows[i].name, rows[i].more);
        source = moe_import_memory(NULL, changed.p, changed.n);
        error.message[0] = '\0';
        status = moe_import_read_model(&model, &source, 1, NULL, NULL, &error);
        CHECKF(status == rows[i].status, "%s: %s: %s", rows[i].arch, rows[i].name, error.message);
        CHECK(status != MOE_OK || (logits(&model, of_changed) &&
                                   same_reals(of_file, of_changed, 4 * (size_t)model.vocabulary)));
        moe_import_free(&model);
        free(changed.p);
        free(s.all.p);
    }
}

/* A GGUF file with one more key in front, which another one may have made room for: as long as
   padding needs, so that the data stay where they are. */
static bytes with_key(bytes b, const char *key, unsigned type, const char *value, size_t n) {
    const size_t size = strlen(key) + n, filler = 8 + 1 + 4 + 8;
    const size_t pad = 32 - (8 + 4 + size + filler) % 32, added = 8 + 4 + size + filler + pad;
    bytes copy;
    unsigned char *p;
    copy.n = b.n + added;
    copy.p = (unsigned char *)grab(copy.n, 1);
    memcpy(copy.p, b.p, 24);
    memcpy(copy.p + 24 + added, b.p + 24, b.n - 24);
    copy.p[16] = (unsigned char)(copy.p[16] + 2); /* the number of keys, fewer than 100 */
    p = copy.p + 24;
    p[0] = (unsigned char)strlen(key);
    memcpy(p + 8, key, strlen(key));
    p += 8 + strlen(key);
    p[0] = (unsigned char)type;
    memcpy(p + 4, value, n);
    p += 4 + n;
    p[0] = 1;
    p[8] = 'x';
    p[9] = 8;
    p[13] = (unsigned char)pad;
    memset(p + filler, '-', pad);
    return copy;
}

/* One key of metadata says something else. */
static void test_seed_keys(void) {
    static const struct {
        const char *arch, *hidden, *shown, *key; /* hidden: a key that gets the name of shown */
        unsigned type;
        const char *value;
        size_t n;
        moe_status status;
        const char *says;
        double beta; /* of yarn, in the attention; 0: any */
    } rows[] = {
        {"deepseek2", "", "", "deepseek2.nextn_predict_layers", 4, "\2\0\0\0", 4, MOE_ERR_CONFIG,
         "nextn_predict_layers = 2: must be less than block_count = 2", 0},
        {"deepseek2", "", "", "deepseek2.attention.temperature_scale", 6, "\0\0\0\0", 4, MOE_OK, "", 0},
        {"llama4", "", "", "llama4.attention.temperature_scale", 6, "\0\0\x80\x3f", 4, MOE_OK, "", 0},
        {"llama4", "", "", "llama4.rope.scaling.type", 8, "\4\0\0\0\0\0\0\0yarn", 12, MOE_ERR_UNSUPPORTED,
         "yarn is not supported together with rope_freqs", 0},
        {"llama4", "", "", "llama4.rope.scaling.type", 8, "\4\0\0\0\0\0\0\0none", 12, MOE_OK, "", 0},
        {"llama4", "sliding_window", "sliding_windoz", "llama4.attention.sliding_window_pattern", 4, "\4\0\0\0", 4,
         MOE_OK, "", 0},
        {"llama4", "sliding_window", "sliding_windoz", "llama4.attention.sliding_window_pattern", 4, "\2\0\0\0", 4,
         MOE_ERR_UNSUPPORTED,
         "sliding_window_pattern must be 4", 0},
        {"qwen3moe", "ffn_norm.weight", "attn_qkv.weight", "qwen3moe.some.key", 4, "\4\0\0\0", 4, MOE_ERR_UNSUPPORTED,
         "blk.0.attn_qkv.weight': not supported for qwen3moe; convert the model without --fuse-qkv", 0},
        {"llama", "", "", "llama.attention.sliding_window_pattern", 4, "\2\0\0\0", 4, MOE_OK, "", 0},
        {"llama", "rope.scaling.type", "rope.scaling.typo", "llama.rope.scaling.type", 8, "\x8\0\0\0\0\0\0\0longrope",
         16, MOE_OK, "", 0},
        {"llama", "rope.scaling.type", "rope.scaling.typo", "llama.rope.scaling.type", 9,
         "\x8\0\0\0\2\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 28, MOE_ERR_UNSUPPORTED,
         "rope.scaling.type = a list is not supported", 0},
        {"llama", "head_count_kv", "head_count_kx", "llama.attention.head_count_kv", 9,
         "\4\0\0\0\2\0\0\0\0\0\0\0\1\0\0\0\1\0\0\0", 20, MOE_OK, "", 0},
        {"llama", "head_count_kv", "head_count_kx", "llama.attention.head_count_kv", 9,
         "\4\0\0\0\1\0\0\0\0\0\0\0\1\0\0\0", 16, MOE_ERR_CONFIG, "head_count_kv = a list: expected a number", 0},
        {"grok", "", "", "grok.rope.scaling.yarn_beta_fast", 6, "\0\0\x80\x40", 4, MOE_OK, "", 4},
        {"grok", "", "", "grok.rope.scaling.other", 6, "\0\0\x80\x40", 4, MOE_OK, "", 8},
        {"olmoe", "expert_used_count", "expert_used_coumt", "olmoe.some.key", 4, "\4\0\0\0", 4, MOE_ERR_NOT_FOUND,
         "metadata: olmoe.expert_used_count is missing", 0},
        {"dbrx", "layer_norm_epsilon", "layer_norm_epsilom", "dbrx.some.key", 4, "\4\0\0\0", 4, MOE_ERR_NOT_FOUND,
         "metadata: attention.layer_norm_epsilon is missing", 0},
        {"llama", "", "", "general.alignment", 4, "\40\0\0\0", 4, MOE_OK, "", 0},
        {"llama", "", "", "general.alignment", 5, "\40\0\0\0", 4, MOE_OK, "", 0},
        {"llama", "", "", "general.alignment", 2, "\20\0", 2, MOE_OK, "", 0},
        {"llama", "", "", "general.alignment", 10, "\40\0\0\0\0\0\0\0", 8, MOE_ERR_FORMAT,
         "general.alignment must be an integer of 16 or 32 bits", 0},
        {"llama", "", "", "general.alignment", 8, "\2\0\0\0\0\0\0\0" "32", 10, MOE_ERR_FORMAT,
         "general.alignment must be an integer of 16 or 32 bits", 0},
        {"llama", "", "", "general.alignment", 4, "\30\0\0\0", 4, MOE_ERR_FORMAT,
         "general.alignment must be 1 to 65536, a power of 2", 0},
        {"llama", "", "", "split.count", 10, "\3\0\0\0\0\0\0\0", 8, MOE_ERR_FORMAT,
         "split.count must be an integer of 16 or 32 bits", 0},
        {"llama", "", "", "split.tensors.count", 5, "\3\0\0\0", 4, MOE_OK, "", 0}}; /* of one file: is not compared */
    size_t i, k;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        moe_imported model;
        moe_import_source source;
        moe_error error;
        moe_status status;
        seed s;
        bytes b, hidden, changed;
        read_seed(&s, rows[i].arch, 0);
        b.p = s.all.p + ((const unsigned char *)s.sources[0].ctx - s.all.p);
        b.n = (size_t)s.sources[0].size;
        hidden = rows[i].hidden[0] != '\0' ? replaced(b, rows[i].hidden, rows[i].shown) : b;
        changed = with_key(hidden, rows[i].key, rows[i].type, rows[i].value, rows[i].n);
        source = moe_import_memory(NULL, changed.p, changed.n);
        error.message[0] = '\0';
        status = moe_import_read_model(&model, &source, 1, NULL, NULL, &error);
        CHECKF(status == rows[i].status && strstr(error.message, rows[i].says) != NULL, "%s: %s: %s", rows[i].key,
               moe_status_text(status), error.message);
        for (k = 0; rows[i].beta > 0.0 && status == MOE_OK && k < model.net.n_modules; k++)
            if (model.net.modules[k].kind == MOE_MODULE_ATTENTION)
                CHECK_NEAR(model.net.modules[k].attention.beta_fast, rows[i].beta, 0.0);
        moe_import_free(&model);
        if (hidden.p != b.p) free(hidden.p);
        free(changed.p);
        free(s.all.p);
    }
}

/* The attention of a block of two heads of 8. scaling: rope.scaling.type; NULL: none. */
static moe_attention_config gguf_attention(const moei_model *of, const moei_model_block *block, const char *scaling) {
    moei_importer r;
    moei_gguf_fact fact;
    moe_attention_config c;
    moe_error error;
    moei_model m = *of;
    memset(&r, 0, sizeof r);
    memset(&fact, 0, sizeof fact);
    r.kind = MOEI_IMPORT_GGUF;
    r.error = &error;
    strcpy(fact.key, "rope.scaling.type");
    strcpy(fact.text, scaling != NULL ? scaling : "");
    fact.kind = MOEI_VALUE_TEXT;
    m.heads = m.kv_heads = 2;
    m.key = m.value = m.n_rot = 8;
    m.base = 10000;
    if (scaling != NULL) CHECK_STATUS(moei_buffer_write(&r.gguf.keys, &fact, sizeof fact), MOE_OK);
    CHECK_STATUS(moei_model_block_attention(&r, &m, block, &c), MOE_OK);
    moe_buffer_free(&r.gguf.keys);
    return c;
}

/* Attention as llama.cpp has it, in compositions that few models have. */
static void test_gguf_attention(void) {
    const double slow = 1 + 0.1 * log(4.0), plain = 1 / sqrt(8.0);
    moei_model_block b;
    moei_model m;
    moe_attention_config c;
    memset(&b, 0, sizeof b);
    memset(&m, 0, sizeof m);
    b.rotates = 1;
    m.factor = 4;
    m.base_window = 5;
    CHECK_NEAR(gguf_attention(&m, &b, NULL).rotary_base, 10000, 0);
    b.window = 3;
    CHECK_NEAR(gguf_attention(&m, &b, NULL).rotary_base, 5, 0);
    b.window = 0;
    CHECK_NEAR(gguf_attention(&m, &b, "yarn").rotary_magnitude, slow, 1e-6);
    m.traits = MOEI_ARCH_GROK;
    m.beta_slow = 2;
    c = gguf_attention(&m, &b, "yarn");
    CHECK_NEAR(c.beta_fast, 8, 0);
    CHECK_NEAR(c.beta_slow, 2, 0);
    m.traits = MOEI_ARCH_LATENT; /* magnitudes multiply the scores, too */
    m.kv_rank = 4;
    c = gguf_attention(&m, &b, "linear");
    CHECK_NEAR(c.scale, plain * slow * slow, 1e-6);
    m.log_multiplier = (moe_real)0.2;
    c = gguf_attention(&m, &b, "yarn");
    CHECK_NEAR(c.rotary_magnitude, 1, 0);
    CHECK_NEAR(c.scale, plain * (1 + 0.2 * log(4.0)) * (1 + 0.2 * log(4.0)), 1e-6);
    memset(&m, 0, sizeof m);
    b.qk_plain = 1;
    c = gguf_attention(&m, &b, NULL);
    CHECK(c.qk_norm == MOE_QK_NORM_PLAIN);
    b.qk_plain = b.rotates = 0;
    b.tuned = 1; /* by numbers of its program, whatever the file says */
    m.tuning_floor = 16;
    m.tuning = 3;
    c = gguf_attention(&m, &b, NULL);
    CHECK(c.query_floor == 8192);
    CHECK_NEAR(c.query_growth, 0.1, 1e-6);
}

/* Keys of config.json that few families have. */
static void test_folder_keys(void) {
    static const char *const interleave[] = {"", "\"rope_interleave\": true", "\"rope_interleave\": false"};
    int i;
    moe_imported model;
    moe_error error;
    for (i = 0; i < 3; i++) {
        CHECKF(import_seed(&model, "deepseek2", NULL, NULL, interleave[i], &error) == MOE_OK, "%s", error.message);
        CHECKF(attention_of(&model, 0)->rotary_neighbours == (i < 2), "%s", interleave[i]);
        moe_import_free(&model);
    }
    /* queries grow by attn_scale, which may be 0; without a word on it by 0.1 */
    for (i = 0; i < 3; i++) {
        static const char *const scales[] = {"\"attn_scale\": 0", "\"attn_scale\": 0.3", ""};
        char last[100];
        sprintf(last, "\"no_rope_layers\": [0, 0]%s%s", i < 2 ? ", " : "", scales[i]);
        CHECKF(import_seed(&model, "llama4", "\"attn_scale\"", "\"attn_scalz\"", last, &error) == MOE_OK, "%s",
               error.message);
        CHECK(attention_of(&model, 0)->query_floor == (i > 0 ? 3 : 0));
        CHECK_NEAR(attention_of(&model, 0)->query_growth, i == 0 ? 0 : i == 1 ? 0.3 : 0.1, 1e-6);
        moe_import_free(&model);
    }
    /* a part of a head that rounds to 0 is none, not the whole head; 0 itself is refused */
    CHECK_STATUS(import_seed(&model, "glm4moe", NULL, NULL, "\"partial_rotary_factor\": 0.05", &error), MOE_OK);
    CHECK(attention_of(&model, 0) != NULL && !attention_of(&model, 0)->rotary);
    moe_import_free(&model);
    CHECK_STATUS(import_seed(&model, "glm4moe", NULL, NULL, "\"partial_rotary_factor\": 0", &error), MOE_ERR_CONFIG);
    /* without a matrix of logits and without a word on it, they are the embedding's */
    CHECK_STATUS(import_seed(&model, "lfm2moe", "\"tie_word_embeddings\"", "\"tie_word_embeddingz\"", "", &error),
                 MOE_OK);
    CHECK(model.net.modules != NULL && model.net.modules[model.net.n_modules - 1].kind == MOE_MODULE_TIED);
    moe_import_free(&model);
    /* num_hidden_layers leaves out those of multi-token prediction */
    for (i = 1; i < 3; i++) {
        char last[100];
        sprintf(last, "\"num_hidden_layers\": %d, \"num_nextn_predict_layers\": %d", i, 3 - i);
        CHECK_STATUS(import_seed(&model, "deepseek2", NULL, NULL, last, &error), MOE_OK);
        CHECK(model.n_blocks == i);
        moe_import_free(&model);
    }
}

/* ---- GGUF files made here ---- */

static void put_number(bytes *b, uint64_t value, int n) {
    for (; n > 0; n--, value >>= 8) b->p[b->n++] = (unsigned char)(value & 255u);
}

static void put_text(bytes *b, const char *text) {
    put_number(b, strlen(text), 8);
    memcpy(b->p + b->n, text, strlen(text));
    b->n += strlen(text);
}

static void put_key(bytes *b, const char *key, unsigned type, uint64_t value, int n) {
    put_text(b, key);
    put_number(b, type, 4);
    put_number(b, value, n);
}

/* The description of a tensor; its dimensions end with a 0. */
static void put_tensor(bytes *b, const char *name, const uint64_t *ne, unsigned type, uint64_t at) {
    int i, n = 0;
    while (ne[n] > 0) n++;
    put_text(b, name);
    put_number(b, (uint64_t)n, 4);
    for (i = 0; i < n; i++) put_number(b, ne[i], 8);
    put_number(b, type, 4);
    put_number(b, at, 8);
}

/* The beginning of a file in a room of 8192 bytes. */
static bytes begin_gguf(int n_tensors, int n_keys) {
    bytes b;
    b.p = (unsigned char *)grab(8192, 1);
    memcpy(b.p, "GGUF", 4);
    b.n = 4;
    put_number(&b, 3, 4);
    put_number(&b, (uint64_t)n_tensors, 8);
    put_number(&b, (uint64_t)n_keys, 8);
    return b;
}

/* Data: zeros from the next multiple of 32 on. The file has just its bytes, so that a sanitizer
   sees what is read behind them. */
static bytes end_gguf(bytes b, size_t data) {
    bytes file;
    b.n += (32 - b.n % 32) % 32 + data;
    CHECK(b.n <= 8192);
    file.n = b.n;
    file.p = (unsigned char *)grab(b.n, 1);
    memcpy(file.p, b.p, b.n);
    free(b.p);
    return file;
}

/* A model of width 1; its last tensor is as the caller says. */
static bytes narrow(const uint64_t *ne, unsigned type, uint64_t at, size_t data) {
    static const struct {
        const char *name;
        uint64_t ne[4];
    } tensors[] = {{"token_embd.weight", {1, 8, 0, 0}},
                   {"output_norm.weight", {1, 0, 0, 0}},
                   {"blk.0.attn_q.weight", {1, 2, 0, 0}},
                   {"blk.0.attn_k.weight", {1, 2, 0, 0}},
                   {"blk.0.attn_v.weight", {1, 2, 0, 0}},
                   {"blk.0.attn_output.weight", {2, 1, 0, 0}},
                   {"blk.0.ffn_norm.weight", {1, 0, 0, 0}},
                   {"blk.0.ffn_gate_inp.weight", {1, 2, 0, 0}},
                   {"blk.0.ffn_gate_exps.weight", {1, 4, 2, 0}},
                   {"blk.0.ffn_up_exps.weight", {1, 4, 2, 0}},
                   {"blk.0.ffn_down_exps.weight", {4, 1, 2, 0}}};
    enum { N = (int)(sizeof tensors / sizeof tensors[0]) };
    bytes b = begin_gguf(N + 1, 10);
    int i;
    put_text(&b, "general.architecture");
    put_number(&b, 8, 4);
    put_text(&b, "llama");
    put_key(&b, "llama.embedding_length", 4, 1, 4);
    put_key(&b, "llama.block_count", 4, 1, 4);
    put_key(&b, "llama.context_length", 4, 64, 4);
    put_key(&b, "llama.expert_used_count", 4, 1, 4);
    put_key(&b, "llama.attention.head_count", 4, 1, 4);
    put_key(&b, "llama.attention.key_length", 4, 2, 4);
    put_key(&b, "llama.attention.value_length", 4, 2, 4);
    put_key(&b, "llama.rope.dimension_count", 4, 2, 4);
    put_key(&b, "llama.attention.layer_norm_rms_epsilon", 6, 0x3727c5acu, 4);
    for (i = 0; i < N; i++) put_tensor(&b, tensors[i].name, tensors[i].ne, 0, 32 * (uint64_t)i);
    put_tensor(&b, "blk.0.attn_norm.weight", ne, type, at);
    return end_gguf(b, data);
}

/* A number without dimensions is no block; a type beyond 31 bits is none; data begin at multiples
   of the alignment. */
static void test_narrow(void) {
    static const struct {
        uint64_t ne[2];
        unsigned type;
        uint64_t at;
        moe_status status;
        const char *says;
    } rows[] = {{{1, 0}, 0, 352, MOE_OK, ""},
                {{0, 0}, 0, 352, MOE_OK, ""},
                {{0, 0}, 1, 352, MOE_OK, ""},
                {{0, 0}, 2, 352, MOE_ERR_FORMAT, "not a multiple of its block size"},
                {{0, 0}, 12, 352, MOE_ERR_FORMAT, "not a multiple of its block size"},
                {{1, 0}, 0x80000000u, 352, MOE_ERR_UNSUPPORTED, "attn_norm.weight': GGUF type 2147483647"},
                {{1, 0}, 0, 356, MOE_ERR_FORMAT, "offset of a tensor is not a multiple of general.alignment"},
                {{2, 0}, 0, 352, MOE_ERR_SHAPE, "attn_norm.weight': the shape must be [1], it is [2]"},
                {{1, 0}, 0, 320, MOE_ERR_FORMAT, "overlaps the one before it"},
                {{1, 0}, 0, 384, MOE_ERR_FORMAT, "go beyond the end of the file"}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        bytes b = narrow(rows[i].ne, rows[i].type, rows[i].at, rows[i].type == 0 ? 360 : 354);
        moe_import_source source = moe_import_memory(NULL, b.p, b.n);
        moe_imported model;
        moe_error error;
        moe_status status;
        static moe_real y[LOGITS];
        error.message[0] = '\0';
        status = moe_import_read_model(&model, &source, 1, NULL, NULL, &error);
        CHECKF(status == rows[i].status && strstr(error.message, rows[i].says) != NULL, "row %d: %s: %s", (int)i,
               moe_status_text(status), error.message);
        CHECK(status != MOE_OK || logits(&model, y));
        moe_import_free(&model);
        free(b.p);
    }
}

/* Tensors of block 0 that are missing: block 1, which has them, is of multi-token prediction and is
   not read. */
static void test_missing(void) {
    static const uint64_t ne[] = {1, 0};
    static const struct {
        const char *arch, *name, *but, *says;
    } rows[] = {
        {"llama", "blk.0.ffn_", "norm", "block 0: its experts are missing in the file"},
        {"grok", "blk.0.layer_output_norm", "none", "tensor 'blk.0.post_ffw_norm.weight': missing in the file"}};
    size_t i, at;
    for (i = 0; i < 2; i++) {
        moe_import_source source;
        moe_imported model;
        moe_error error;
        bytes b, more;
        seed s;
        char key[40];
        read_seed(&s, "grok", 0);
        b.p = s.all.p + ((const unsigned char *)s.sources[0].ctx - s.all.p);
        b.n = (size_t)s.sources[0].size;
        if (i == 0) b = narrow(ne, 0, 352, 360);
        sprintf(key, "%s.nextn_predict_layers", rows[i].arch);
        more = with_key(b, key, 4, "\1\0\0\0", 4);
        more.p[find(more, "block_count", 0) + 15] = 2;
        for (at = 0; (at = find(more, rows[i].name, at + 1)) < more.n;)
            if (memcmp(more.p + at + strlen(rows[i].name), rows[i].but, 4) != 0) more.p[at + 4] = '1';
        source = moe_import_memory(NULL, more.p, more.n);
        CHECK_STATUS(moe_import_read_model(&model, &source, 1, NULL, NULL, &error), MOE_ERR_NOT_FOUND);
        CHECK(strcmp(error.message, rows[i].says) == 0, error.message);
        moe_import_free(&model);
        if (i == 0) free(b.p);
        free(more.p);
        free(s.all.p);
    }
}

/* A tensor whose end exceeds 64 bits does not let those behind it share bytes: the layer would be
   larger than the file. */
static void test_shared_bytes(void) {
    static const uint64_t router[] = {4, 2, 0};
    static const uint64_t experts[] = {4, 4, 2, 0};
    static const uint64_t whole[] = {UINT64_C(0x1ffffffffffffff0), 0};
    static const char *const names[] = {"blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight",
                                        "blk.0.ffn_down_exps.weight"};
    bytes b = begin_gguf(7, 2);
    moe_import_source source;
    moe_layer layer;
    moe_error error;
    moe_status status;
    int i;
    put_text(&b, "general.architecture");
    put_number(&b, 8, 4);
    put_text(&b, "llama");
    put_key(&b, "llama.expert_used_count", 4, 1, 4);
    put_tensor(&b, "blk.0.ffn_gate_inp.weight", router, 0, 0);
    for (i = 0; i < 3; i++) {
        put_tensor(&b, names[i], experts, 0, 32);
        put_tensor(&b, "other", whole, 28, 160); /* 2^64 - 128 bytes of F64 */
    }
    b = end_gguf(b, 160);
    source = moe_import_memory("m.gguf", b.p, b.n);
    error.message[0] = '\0';
    status = moe_import_read(&layer, &source, 1, "blk.0", NULL, NULL, &error);
    CHECK_STATUS(status, MOE_ERR_FORMAT);
    CHECK(strstr(error.message, "a tensor overlaps the one before it") != NULL, error.message);
    if (status == MOE_OK) moe_layer_free(&layer);
    free(b.p);
}

/* Split files: the parts must have as many tensors as part 1 says, or one of another model would go
   unnoticed where a tensor may be absent (here the matrix of the logits). */
static void test_split_tensors(void) {
    static const struct {
        int more; /* of tensors, as the key says; 0: there is no key */
        unsigned type;
        moe_status status;
        const char *says;
    } rows[] = {{0, 5, MOE_OK, ""},
                {100, 5, MOE_OK, ""},
                {100, 4, MOE_OK, ""},
                {101, 5, MOE_ERR_FORMAT, "the parts have %d tensors, split.tensors.count says %d"},
                {99, 5, MOE_ERR_FORMAT, "the parts have %d tensors, split.tensors.count says %d"},
                {100, 6, MOE_ERR_FORMAT, "split.tensors.count must be an integer of 16 or 32 bits"}};
    size_t i;
    for (i = 0; i < 2 * sizeof rows / sizeof rows[0]; i++) {
        const int second = (int)(i % 2), row = (int)(i / 2);
        moe_import_source sources[2];
        moe_imported model;
        moe_error error;
        moe_status status;
        char says[100], value[4];
        seed s;
        bytes b, counted, part, rest = begin_gguf(0, 2);
        int n;
        read_seed(&s, "llama", 0);
        b.p = s.all.p + ((const unsigned char *)s.sources[0].ctx - s.all.p);
        b.n = (size_t)s.sources[0].size;
        n = b.p[8];
        put_key(&rest, "split.no", 2, 1, 2);
        put_key(&rest, "split.count", 2, 2, 2);
        rest = end_gguf(rest, 0);
        memset(value, 0, sizeof value);
        value[0] = (char)(n + rows[row].more - 100);
        counted = with_key(b, rows[row].more > 0 ? "split.tensors.count" : "some.key", rows[row].type, value, 4);
        part = with_key(counted, "split.count", 2, "\2\0", 2);
        sources[second] = moe_import_memory("m-00001-of-00002.gguf", part.p, part.n);
        sources[1 - second] = moe_import_memory("m-00002-of-00002.gguf", rest.p, rest.n);
        sprintf(says, rows[row].says, n, n + rows[row].more - 100);
        error.message[0] = '\0';
        status = moe_import_read_model(&model, sources, 2, NULL, NULL, &error);
        CHECKF(status == rows[row].status && strstr(error.message, says) != NULL, "row %d: %s: %s", row,
               moe_status_text(status), error.message);
        CHECK(status != MOE_OK || model.file_bytes == part.n + rest.n); /* each part once */
        moe_import_free(&model);
        free(rest.p);
        free(part.p);
        free(counted.p);
        free(s.all.p);
    }
}

/* An index may begin with any white space of JSON. */
static void test_index(void) {
    static const char names[] = "{\"weight_map\": {\"model.embed_tokens.weight\": \"model.safetensors\"}}";
    static const struct {
        const char *begin;
        moe_status status;
    } rows[] = {{"", MOE_OK}, {"\t", MOE_OK}, {" \r\n\t", MOE_OK}, {"\v", MOE_ERR_FORMAT}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char text[200];
        moe_import_source sources[3];
        moe_imported model;
        moe_error error;
        seed s;
        read_seed(&s, "olmoe", 1);
        sprintf(text, "%s%s", rows[i].begin, names);
        sources[0] = moe_import_memory("model.safetensors.index.json", text, strlen(text));
        sources[1] = s.sources[0];
        sources[2] = s.sources[1];
        CHECK_STATUS(moe_import_read_model(&model, sources, 3, NULL, NULL, &error), rows[i].status);
        moe_import_free(&model);
        free(s.all.p);
    }
}

/* llama4 with rope.scaling.type = none and a factor, unless that is 1 or there are no windows. Then
   nothing is scaled, not even angles with factors of their own. */
static void test_unscaled(void) {
    static const struct {
        const char *window, *factor;
        moe_status status;
    } rows[] = {{"sliding_windoz", "\0\0\0\x41", MOE_ERR_UNSUPPORTED},
                {"sliding_windoz", "\0\0\x80\x3f", MOE_OK},
                {"sliding_window", "\0\0\0\x41", MOE_OK}};
    size_t i, module;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        moe_imported model;
        moe_import_source source;
        moe_error error;
        seed s;
        bytes b, window, factor, changed;
        read_seed(&s, "llama4", 0);
        b.p = s.all.p + ((const unsigned char *)s.sources[0].ctx - s.all.p);
        b.n = (size_t)s.sources[0].size;
        window = replaced(b, "sliding_window", rows[i].window);
        factor = with_key(window, "llama4.rope.scaling.factor", 6, rows[i].factor, 4);
        changed = with_key(factor, "llama4.rope.scaling.type", 8, "\4\0\0\0\0\0\0\0none", 12);
        source = moe_import_memory(NULL, changed.p, changed.n);
        error.message[0] = '\0';
        CHECK_STATUS(moe_import_read_model(&model, &source, 1, NULL, NULL, &error), rows[i].status);
        CHECK(rows[i].status == MOE_OK || strstr(error.message, "none is not supported together with "
                                                 "rope.scaling.factor = 8") != NULL, error.message);
        for (module = 0; module < model.net.n_modules; module++) {
            const moe_real *factors = model.net.modules[module].tensors[MOE_MODULE_ROTARY_FACTORS];
            if (factors != NULL) CHECK_NEAR(factors[0], 4.75415, 1e-5);
        }
        moe_import_free(&model);
        free(window.p);
        free(factor.p);
        free(changed.p);
        free(s.all.p);
    }
}

/* Blocks may have other numbers of heads, but not more rotary pairs than rope_freqs has. */
static void test_unequal_heads(void) {
    static const char list[] = "\4\0\0\0\2\0\0\0\0\0\0\0\1\0\0\0\3\0\0\0";
    static const char *const keys[] = {"attention.head_count", "attention.head_count_kv", "rope.dimension_count"};
    moe_imported model;
    moe_import_source source;
    moe_error error;
    seed s;
    bytes b, changed;
    char name[40];
    size_t i;
    read_seed(&s, "llama4", 0);
    b.p = s.all.p + ((const unsigned char *)s.sources[0].ctx - s.all.p);
    b.n = (size_t)s.sources[0].size;
    for (i = 0; i < 3; i++) b.p[find(b, keys[i], 0) + strlen(keys[i]) - 1] = 'z';
    for (i = 0; i < 2; i++, b = changed) {
        sprintf(name, "llama4.%s", keys[i]);
        changed = with_key(b, name, 9, list, 20);
        if (i == 1) free(b.p);
    }
    source = moe_import_memory(NULL, b.p, b.n);
    CHECK_STATUS(moe_import_read_model(&model, &source, 1, NULL, NULL, &error), MOE_ERR_SHAPE);
    CHECK(strcmp(error.message, "tensor 'rope_freqs.weight': the shape must be [1], it is [3]") == 0, error.message);
    moe_import_free(&model);
    free(b.p);
    free(s.all.p);
}

/* Queries that grow with the position, beyond llama4: only up to where they begin to. */
static void test_tuning(void) {
    moe_imported model;
    moe_import_options options;
    moe_import_source source;
    moe_error error;
    seed s;
    bytes b, changed, unknown;
    read_seed(&s, "deepseek2", 0);
    b.p = s.all.p + ((const unsigned char *)s.sources[0].ctx - s.all.p);
    b.n = (size_t)s.sources[0].size;
    changed = with_key(b, "deepseek2.attention.temperature_scale", 6, "\0\0\x80\x3f", 4);
    source = moe_import_memory(NULL, changed.p, changed.n);
    memset(&options, 0, sizeof options);
    options.context = 4096;
    CHECK(moe_import_read_model(&model, &source, 1, &options, NULL, &error) == MOE_OK, error.message);
    moe_import_free(&model);
    options.context = 4097;
    CHECK_STATUS(moe_import_read_model(&model, &source, 1, &options, NULL, &error), MOE_ERR_UNSUPPORTED);
    CHECK(strstr(error.message, "temperature_scale = 1: sequences of more than 4096 tokens") != NULL, error.message);
    unknown = replaced(changed, "deepseek2.context_length", "deepseek2.context_lengtx"); /* any length */
    source = moe_import_memory(NULL, unknown.p, unknown.n);
    options.context = 0;
    CHECK_STATUS(moe_import_read_model(&model, &source, 1, &options, NULL, &error), MOE_ERR_UNSUPPORTED);
    free(unknown.p);
    free(changed.p);
    free(s.all.p);
}

/* A safetensors file in whose header every `text` is another one, of any length. */
static bytes with_header(bytes b, const char *text, const char *with) {
    const size_t length = (size_t)b.p[0] | (size_t)b.p[1] << 8;
    const size_t n = strlen(text), m = strlen(with);
    bytes copy;
    size_t at, to, times;
    times = 0;
    to = 8;
    for (at = 8; at + n <= 8 + length; at++) times += memcmp(b.p + at, text, n) == 0;
    CHECK(times > 0, text);
    copy.n = b.n + times * m - times * n;
    copy.p = (unsigned char *)grab(copy.n, 1);
    for (at = 8; at < b.n; to += 1)
        if (at + n <= 8 + length && memcmp(b.p + at, text, n) == 0) {
            memcpy(copy.p + to, with, m);
            to += m - 1;
            at += n;
        } else copy.p[to] = b.p[at++];
    to = length + times * m - times * n;
    copy.p[0] = (unsigned char)(to & 255u);
    copy.p[1] = (unsigned char)(to >> 8);
    return copy;
}

/* Names with the prefix of models that read pictures, tensors that nothing needs, and scales that
   do not fit their tensors. */
static void test_headers(void) {
    static const struct {
        const char *text, *with, *text_2, *with_2;
        moe_status status;
        const char *says;
    } rows[] = {
        {"\"model.", "\"language_model.model.", "\"lm_head", "\"language_model.lm_head", MOE_OK, ""},
        {"\"model.embed_tokens.weight\"", "\"model.layers.0.self_attn.rotary_emb.inv_freq\": {\"dtype\": \"F32\", "
         "\"shape\": [0], \"data_offsets\": [0, 0]}, \"model.embed_tokens.weight\"", NULL, NULL, MOE_OK, ""},
        {"layers.0.mlp.experts.gate_up_proj_blocks\": {\"dtype\": \"U8\"",
         "layers.0.mlp.experts.gate_up_proj_blocks\": {\"dtype\": \"I8\"", NULL, NULL, MOE_ERR_SHAPE,
         "'model.layers.0.mlp.experts.gate_up_proj_blocks': not U8 with 16 bytes for every byte of its scales"},
        {"layers.1.mlp.experts.gate_up_proj_scales\": {\"dtype\": \"U8\"",
         "layers.1.mlp.experts.gate_up_proj_scales\": {\"dtype\": \"I8\"", NULL, NULL, MOE_ERR_SHAPE,
         "not U8 with 16 bytes for every byte of its scales"},
        {"[4, 64, 2, 16]", "[4, 64, 4, 8]", NULL, NULL, MOE_ERR_SHAPE, "not U8 with 16 bytes"},
        {"[4, 64, 2, 16]", "[4, 64, 32]", NULL, NULL, MOE_ERR_SHAPE, "not U8 with 16 bytes"},
        {"[4, 64, 2]", "[4, 32, 4]", NULL, NULL, MOE_ERR_SHAPE, "not U8 with 16 bytes"},
        {"[4, 64, 2]", "[512]", NULL, NULL, MOE_ERR_SHAPE, "not U8 with 16 bytes"},
        {"gate_up_proj_blocks", "gate_up_proj_block", NULL, NULL, MOE_ERR_UNSUPPORTED,
         "'model.layers.0.mlp.experts.gate_up_proj_block': "},
        {"layers.1.mlp.router.weight", "layers.1.self_attn.rotary_emb.inv_freq", NULL, NULL, MOE_ERR_NOT_FOUND,
         "'model.layers.1.mlp.router.weight': missing in the file; gpt_oss needs it"},
        {"layers.1.mlp.router.bias\": {\"dtype\": \"BF16\"", "layers.1.mlp.router.bias\": {\"dtype\": \"I16\"", NULL,
         NULL, MOE_ERR_UNSUPPORTED, "'model.layers.1.mlp.router.bias': dtype I16 is not supported"},
        {"[80, 64]", "[5120]", NULL, NULL, MOE_ERR_SHAPE, "the shape must be"},
        {"[80, 64]", "[0, 64]", NULL, NULL, MOE_ERR_FORMAT, ""}};
    const bytes b = read_file(FOLDER "gpt_oss-mxfp4/model.safetensors");
    const bytes config = read_file(FOLDER "gpt_oss-mxfp4/config.json");
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        bytes once = with_header(b, rows[i].text, rows[i].with);
        bytes both = rows[i].text_2 != NULL ? with_header(once, rows[i].text_2, rows[i].with_2) : once;
        moe_import_source sources[2];
        moe_imported model;
        moe_error error;
        moe_status status;
        static moe_real y[LOGITS];
        sources[0] = moe_import_memory("model.safetensors", both.p, both.n);
        sources[1] = moe_import_memory("config.json", config.p, config.n);
        error.message[0] = '\0';
        status = moe_import_read_model(&model, sources, 2, NULL, NULL, &error);
        CHECKF(status == rows[i].status && strstr(error.message, rows[i].says) != NULL, "%s -> %s: %s: %s",
               rows[i].text, rows[i].with, moe_status_text(status), error.message);
        CHECK(status != MOE_OK || logits(&model, y));
        moe_import_free(&model);
        if (both.p != once.p) free(both.p);
        free(once.p);
    }
    free(b.p);
    free(config.p);
}

/* Tensors of images and of multi-token prediction are left out; a block that has one of its
   optional biases or norms needs the others. */
static void test_parts(void) {
    static const struct {
        const char *arch, *text, *with;
        moe_status status;
        const char *says;
    } rows[] = {
        {"ernie4_5-moe", "\"model.embed_tokens.weight\"", "\"model.mtp_block.0.norm.weight\": {\"dtype\": \"F32\", "
         "\"shape\": [0], \"data_offsets\": [0, 0]}, \"model.embed_tokens.weight\"", MOE_OK, ""},
        {"ernie4_5-moe", "\"model.embed_tokens.weight\"", "\"model.mtq_block.0.norm.weight\": {\"dtype\": \"F32\", "
         "\"shape\": [0], \"data_offsets\": [0, 0]}, \"model.embed_tokens.weight\"", MOE_ERR_UNSUPPORTED, "mtq_block"},
        {"llama4", "\"model.embed_tokens.weight\"", "\"vision_model.layers.0.norm.weight\": {\"dtype\": \"F32\", "
         "\"shape\": [0], \"data_offsets\": [0, 0]}, \"multi_modal_projector.linear_1.weight\": {\"dtype\": \"F32\", "
         "\"shape\": [0], \"data_offsets\": [0, 0]}, \"model.embed_tokens.weight\"", MOE_OK, ""},
        {"glm4moe", "layers.1.self_attn.k_norm.weight", "layers.1.self_attn.rotary_emb.inv_freq", MOE_ERR_NOT_FOUND,
         "layers.1.self_attn.k_norm.weight': missing"},
        {"glm4moe", "layers.1.self_attn.q_norm.weight", "layers.1.self_attn.rotary_emb.inv_freq", MOE_ERR_NOT_FOUND,
         "layers.1.self_attn.q_norm.weight': missing"},
        {"lfm2moe", "conv.conv.weight", "self_attn.rotary_emb.inv_freq", MOE_ERR_NOT_FOUND,
         "conv.conv.weight': missing"},
        {"granitemoe", "self_attn.q_proj.bias", "self_attn.rotary_emb.inv_freq", MOE_ERR_NOT_FOUND,
         "self_attn.q_proj.bias': missing"},
        {"granitemoe", "self_attn.k_proj.bias", "self_attn.rotary_emb.inv_freq", MOE_ERR_NOT_FOUND,
         "self_attn.k_proj.bias': missing"},
        {"granitemoe", "self_attn.v_proj.bias", "self_attn.rotary_emb.inv_freq", MOE_ERR_NOT_FOUND,
         "self_attn.v_proj.bias': missing"}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        moe_imported model;
        moe_error error;
        moe_status status;
        bytes b, changed;
        seed s;
        read_seed(&s, rows[i].arch, 1);
        b.p = s.all.p + ((const unsigned char *)s.sources[0].ctx - s.all.p);
        b.n = (size_t)s.sources[0].size;
        changed = with_header(b, rows[i].text, rows[i].with);
        s.sources[0] = moe_import_memory("model.safetensors", changed.p, changed.n);
        error.message[0] = '\0';
        status = moe_import_read_model(&model, s.sources, 2, NULL, NULL, &error);
        CHECKF(status == rows[i].status && strstr(error.message, rows[i].says) != NULL, "%s: %s: %s: %s", rows[i].arch,
               rows[i].text, moe_status_text(status), error.message);
        moe_import_free(&model);
        free(changed.p);
        free(s.all.p);
    }
}

/* Any one of the optional biases asks for all three. */
static void test_one_bias(void) {
    static const int places[] = {MOEI_PLACE_QUERY_BIAS, MOEI_PLACE_KEY_BIAS, MOEI_PLACE_VALUE_BIAS};
    moei_import_tensor f;
    moei_model_block b;
    int i;
    memset(&f, 0, sizeof f);
    for (i = 0; i < 3; i++) {
        memset(&b, 0, sizeof b);
        b.places[places[i]] = &f;
        moei_model_block_both(&b);
        CHECK(b.traits == MOEI_ARCH_BIAS);
    }
}

/* Experts in FP8 whose scales lie beside them. */
static void test_fp8(void) {
    static const char place[] = "input_linear.weight\": {\"dtype\": \"BF16\", \"shape\": [2, 4, 8], "
                                "\"data_offsets\": [576, 704]}";
    static const struct {
        const char *scales; /* of 64 bytes: type and shape */
        int bytes;
        const char *block;
        moe_status status;
        const char *says;
    } rows[] = {
        {"\"F32\", \"shape\": [2, 2, 1]", 16, "[2, 8]", MOE_OK, ""},
        {"\"F32\", \"shape\": [2, 1, 1]", 8, "[128, 128]", MOE_ERR_UNSUPPORTED,
         "'model.layers.0.block_sparse_moe.input_linear.weight': a block of scales spans two of its parts"},
        {"\"F32\", \"shape\": [2, 2, 1]", 16, "[128, 128]", MOE_ERR_SHAPE,
         "'model.layers.0.block_sparse_moe.input_linear.weight': not F8_E4M3 with one F32 scale per"},
        {"\"F32\", \"shape\": [2, 2, 1]", 16, "[2, 4]", MOE_ERR_SHAPE, "one F32 scale per"},
        {"\"F32\", \"shape\": [2, 2, 1]", 16, "[2, \"8\"]", MOE_ERR_SHAPE, "one F32 scale per"},
        {"\"F32\", \"shape\": [2, 2, 1]", 16, "[2, 0]", MOE_ERR_SHAPE, "one F32 scale per"},
        {"\"F32\", \"shape\": [2, 2, 1]", 16, "[2, 99999999]", MOE_ERR_SHAPE, "one F32 scale per"},
        {"\"F32\", \"shape\": [2, 2, 1]", 16, "[2]", MOE_ERR_SHAPE, "one F32 scale per"},
        {"\"F32\", \"shape\": [2, 2, 1]", 16, "[]", MOE_ERR_SHAPE, "one F32 scale per"},
        {"\"F32\", \"shape\": [2, 2, 1]", 16, "8", MOE_ERR_SHAPE, "one F32 scale per"},
        {"\"F32\", \"shape\": [2, 2, 1, 1]", 16, "[2, 8]", MOE_ERR_SHAPE, "one F32 scale per"},
        {"\"F32\", \"shape\": [4, 1]", 16, "[2, 8]", MOE_ERR_SHAPE, "one F32 scale per"},
        {"\"I32\", \"shape\": [2, 2, 1]", 16, "[2, 8]", MOE_ERR_SHAPE, "one F32 scale per"}};
    enum { ROWS = (int)(sizeof rows / sizeof rows[0]) };
    size_t k;
    for (k = 0; k < 2 * ROWS; k++) { /* then the same in another FP8 type */
        const int other = k >= ROWS;
        const size_t i = k % ROWS;
        const moe_status wanted = other ? MOE_ERR_SHAPE : rows[i].status;
        char text[600], config[2000];
        moe_imported model;
        moe_error error;
        moe_status status;
        seed s;
        bytes b, changed;
        read_seed(&s, "granitemoe", 1);
        b.p = s.all.p + ((const unsigned char *)s.sources[0].ctx - s.all.p);
        b.n = (size_t)s.sources[0].size;
        sprintf(text,
                "input_linear.weight\": {\"dtype\": \"%s\", \"shape\": [2, 4, 8], \"data_offsets\": [576, 640]}, "
                "\"model.layers.0.block_sparse_moe.input_linear.weight_scale_inv\": {\"dtype\": %s, \"data_offsets\": "
                "[640, %d]}, \"model.layers.0.self_attn.rotary_emb.inv_freq\": {\"dtype\": \"U8\", \"shape\": [%d], "
                "\"data_offsets\": [%d, 704]}", other ? "F8_E5M2" : "F8_E4M3", rows[i].scales, 640 + rows[i].bytes,
                64 - rows[i].bytes, 640 + rows[i].bytes);
        changed = with_header(b, place, text);
        sprintf(config, "%.*s, \"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", "
                        "\"weight_block_size\": %s}}", (int)s.sources[1].size - 2, (const char *)s.sources[1].ctx,
                rows[i].block);
        s.sources[0] = moe_import_memory("model.safetensors", changed.p, changed.n);
        s.sources[1] = moe_import_memory("config.json", config, strlen(config));
        error.message[0] = '\0';
        status = moe_import_read_model(&model, s.sources, 2, NULL, NULL, &error);
        CHECKF(status == wanted && strstr(error.message, other ? "not F8_E4M3 with one F32" : rows[i].says) != NULL,
               "%s, %s: %s: %s", rows[i].scales, rows[i].block, moe_status_text(status), error.message);
        moe_import_free(&model);
        free(changed.p);
        free(s.all.p);
    }
}

/* Blocks of 2 rows in experts of 3: each expert begins a block of its own. */
static void test_uneven_scales(void) {
    static const unsigned char ones[] = {0x38, 0x38, 0x38, 0x38, 0x38, 0x38}; /* of E4M3 */
    static const unsigned char scales[] = {0, 0, 0x80, 0x3f, 0, 0, 0, 0x40, 0, 0, 0x40, 0x40, 0, 0, 0x80, 0x40};
    static const double wanted[] = {1, 1, 2, 3, 3, 4};
    moei_import_tensor f;
    moe_real values[6];
    int i;
    memset(&f, 0, sizeof f);
    f.type = moei_gguf_type_find(MOEI_TYPE_E4M3);
    f.n_dims = 3;
    f.shape[0] = 2;
    f.shape[1] = 3;
    f.shape[2] = 1;
    f.scales.width = f.scales.columns = 1;
    f.scales.rows = 2;
    moei_import_unscale(&f, scales, 0, 6, ones, values);
    for (i = 0; i < 6; i++) CHECK_NEAR(values[i], wanted[i], 0);
}

/* Of two tensors of scales the first is attached; the other stays, to be refused as unknown. */
static void test_scales_twice(void) {
    moei_importer r;
    moei_import_shard shard;
    moei_import_tensor f;
    moe_buffer list;
    moe_error error;
    int i;
    memset(&r, 0, sizeof r);
    memset(&shard, 0, sizeof shard);
    memset(&list, 0, sizeof list);
    r.error = &error;
    for (i = 0; i < 3; i++) {
        memset(&f, 0, sizeof f);
        f.shard = &shard;
        f.at = (uint64_t)i;
        f.n_dims = 2;
        f.shape[0] = f.shape[1] = 1;
        f.count = 1;
        f.bytes = i == 0 ? 1 : 4;
        f.type = i == 0 ? moei_gguf_type_find(MOEI_TYPE_E4M3) : NULL;
        f.dtype = i == 0 ? MOE_DTYPE_COUNT : MOE_DTYPE_F32;
        CHECK_STATUS(moei_import_tensor_add(&r, &list, &f, i == 0 ? "w" : "w_scale_inv"), MOE_OK);
    }
    CHECK_STATUS(moei_import_join(&r, &list), MOE_OK);
    if (CHECK(moei_import_tensor_count(&list) == 2)) {
        CHECK(moei_import_tensor_at(&list, 0)->scales.at == 1 && moei_import_tensor_at(&list, 1)->at == 2);
    }
    moe_buffer_free(&list);
}

/* Sources whose bytes are copied: no memory for them, and bytes that do not come. */
static moe_status read_head(void *ctx, uint64_t at, void *to, size_t size) {
    return size == ((const bytes *)ctx)->n ? MOE_ERR_IO : read_slowly(ctx, at, to, size);
}

/* Sources of which one read fails. */
typedef struct brittle {
    bytes b;
    long *left; /* reads until then */
} brittle;

static moe_status read_brittle(void *ctx, uint64_t at, void *to, size_t size) {
    brittle *b = (brittle *)ctx;
    return (*b->left)-- == 0 ? MOE_ERR_IO : read_slowly(&b->b, at, to, size);
}

/* Every read fails once: the importer says so, and nothing stays behind. prefix: of a layer; NULL:
   the model. wanted: the status when none fails. */
static void test_reads(const char *const *paths, size_t n, const char *prefix, moe_status wanted) {
    static const char *const names[] = {"model.safetensors", "config.json"};
    brittle files[2];
    moe_import_source sources[2];
    moe_status status = MOE_ERR_IO;
    long left, k;
    size_t i;
    for (i = 0; i < n; i++) {
        files[i].b = read_file(paths[i]);
        files[i].left = &left;
        sources[i] = moe_import_memory(names[i], files[i].b.p, files[i].b.n);
        sources[i].ctx = &files[i];
        sources[i].read_at = read_brittle;
    }
    for (k = 0; status == MOE_ERR_IO && k < 5000; k++) {
        test_heap heap;
        moe_allocator a = test_allocator(&heap, 0);
        moe_imported model;
        moe_layer layer;
        moe_error error;
        left = k;
        memset(&layer, 0, sizeof layer);
        memset(&model, 0, sizeof model);
        error.message[0] = '\0';
        status = prefix == NULL ? moe_import_read_model(&model, sources, n, NULL, &a, &error)
                                : moe_import_read(&layer, sources, n, prefix, NULL, &a, &error);
        CHECKF((left < 0) == (status == MOE_ERR_IO) && (status == MOE_OK || error.message[0] != '\0'), "%s: %ld: %s",
               paths[0], k, error.message);
        moe_import_free(&model);
        moe_layer_free(&layer);
        CHECKF(heap.blocks == 0 && !heap.wrong_size, "%s: %ld: memory is left", paths[0], k);
    }
    CHECKF(status == wanted && k > 3, "%s: %s after %ld", paths[0], moe_status_text(status), k);
    for (i = 0; i < n; i++) free(files[i].b.p);
}

static void test_seed_copied(void) {
    moe_imported model;
    moe_error error;
    seed s;
    bytes b;
    read_seed(&s, "grok", 0);
    b.p = s.all.p + ((const unsigned char *)s.sources[0].ctx - s.all.p);
    b.n = (size_t)s.sources[0].size;
    s.sources[0].ctx = &b;
    s.sources[0].read_at = read_slowly;
    test_seed_memory(&s, "grok, copied");
    s.sources[0].read_at = read_head;
    CHECK_STATUS(moe_import_read_model(&model, s.sources, 1, NULL, NULL, &error), MOE_ERR_IO);
    free(s.all.p);
}

/* The experts of a layer in MXFP4 are those of the model. */
static void test_packed_layer(void) {
    moe_layer layer;
    moe_error error;
    moe_imported model;
    size_t i, module, wrong = 0, n;
    moe_real row[64];
    test_heap heap;
    long at;
    for (at = 1;; at++) { /* without memory for one of its parts */
        const moe_allocator a = test_allocator(&heap, at);
        const moe_status status = moe_import_layer(&layer, FOLDER "gpt_oss-mxfp4", "model.layers.0", NULL, &a, &error);
        if (status == MOE_OK) moe_layer_free(&layer);
        if (!CHECKF(heap.blocks == 0 && !heap.wrong_size, "%ld: memory is left", at)) break;
        if (status == MOE_OK && heap.calls < at) break;
        if (!CHECKF(status == MOE_OK || status == MOE_ERR_MEMORY, "%ld: %s", at, error.message)) break;
    }
    CHECKF(at > 10, "%ld calls for memory", at);
    if (!CHECK(moe_import_layer(&layer, FOLDER "gpt_oss-mxfp4", "model.layers.0", NULL, NULL, &error) == MOE_OK,
               error.message))
        return;
    if (CHECK(moe_import_model(&model, FOLDER "gpt_oss-mxfp4", NULL, NULL, &error) == MOE_OK, error.message)) {
        for (module = 0; model.net.modules[module].kind != MOE_MODULE_MIXTURE;) module++;
        n = (size_t)layer.config.d_ff;
        for (i = 0; i < n; i++) {
            const moe_external *w = model.net.modules[module].layer.external[MOE_EXPERTS_GATE] + 1;
            w->type->unpack(model.net.kernels, w, i, 0, 64, row);
            wrong += memcmp(row, layer.tensors[MOE_EXPERTS_GATE] + (n + i) * 64, sizeof row) != 0;
        }
        CHECKF(wrong == 0 && layer.config.router.d_model == 64, "%lu rows differ", (unsigned long)wrong);
        moe_import_free(&model);
    }
    moe_layer_free(&layer);
}

/* An index lists scales as tensors of their own. */
static void test_listed_scales(void) {
    static const char *const names[] = {"router.weight", "router.bias", "experts.gate_up_proj_blocks",
                                        "experts.gate_up_proj_scales", "experts.gate_up_proj_bias",
                                        "experts.down_proj_blocks", "experts.down_proj_scales",
                                        "experts.down_proj_bias", "experts.up_proj_scales"};
    const bytes b = read_file(FOLDER "gpt_oss-mxfp4/model.safetensors");
    const bytes config = read_file(FOLDER "gpt_oss-mxfp4/config.json");
    size_t n;
    for (n = 8; n <= 9; n++) { /* the last one is not in the file */
        char index[1000] = "{\"weight_map\": {";
        moe_import_source sources[3];
        moe_layer layer;
        moe_error error;
        moe_status status;
        size_t i;
        for (i = 0; i < n; i++)
            sprintf(index + strlen(index), "%s\"model.layers.0.mlp.%s\": \"model.safetensors\"", i > 0 ? ", " : "",
                    names[i]);
        strcat(index, "}}");
        sources[0] = moe_import_memory("model.safetensors.index.json", index, strlen(index));
        sources[1] = moe_import_memory("model.safetensors", b.p, b.n);
        sources[2] = moe_import_memory("config.json", config.p, config.n);
        status = moe_import_read(&layer, sources, 3, "model.layers.0", NULL, NULL, &error);
        CHECKF(status == (n == 8 ? MOE_OK : MOE_ERR_NOT_FOUND), "%s", error.message);
        if (status == MOE_OK) moe_layer_free(&layer);
    }
    free(b.p);
    free(config.p);
}

/* Whatever a digit, a letter or a byte of the header or of config.json is. */
static void test_seed_bytes(const seed *s, const char *name) {
    moe_rng rng;
    int i, made = 0, tries = 300;
    moe_rng_seed(&rng, 11);
    for (i = 0; i < tries; i++) {
        const moe_import_source *source = &s->sources[s->n > 1 ? moe_rng_next(&rng) % 2 : 0];
        unsigned char *byte = s->all.p + ((const unsigned char *)source->ctx - s->all.p), before;
        byte += moe_rng_next(&rng) % (source->size < 2500 ? source->size : 2500);
        before = *byte;
        *byte = (unsigned char)(moe_rng_next(&rng) % 3 == 0 ? '0' + moe_rng_next(&rng) % 10
                                                            : before ^ 1u << moe_rng_next(&rng) % 8);
        made += import_anything(s->sources, s->n);
        *byte = before;
    }
    CHECKF(made < tries && import_anything(s->sources, s->n), "%s: %d of %d are models", name, made, tries);
}

static void test_seeds(int folder) {
    static const char *const files[] = {"llama", "granitemoe", "olmoe", "qwen2moe", "qwen3moe", "deepseek", "deepseek2",
                                        "phimoe", "dots1", "glm4moe", "ernie4_5-moe", "hunyuan-moe", "bailingmoe",
                                        "bailingmoe2", "lfm2moe", "minimax-m2", "llama4", "dbrx", "grok"};
    static const char *const folders[] = {"llama", "granitemoe", "olmoe", "qwen2moe", "deepseek2", "phimoe", "dots1",
                                          "glm4moe", "ernie4_5-moe", "hunyuan-moe", "lfm2moe", "minimax-m2", "llama4",
                                          "gpt-oss"};
    const char *const *names = folder ? folders : files;
    const size_t n = folder ? sizeof folders / sizeof folders[0] : sizeof files / sizeof files[0];
    size_t i;
    for (i = 0; i < n; i++) {
        seed s;
        read_seed(&s, names[i], folder);
        test_seed_memory(&s, names[i]);
        test_seed_bytes(&s, names[i]);
        free(s.all.p);
    }
}

int main(void) {
    static const char *const gguf[] = {GGUF}, *const gguf_oss[] = {GGUF_OSS};
    static const char *const folder[] = {FOLDER "deepseek_v3-bf16/model.safetensors",
                                         FOLDER "deepseek_v3-bf16/config.json"};
    static const char *const mxfp4[] = {FOLDER "gpt_oss-mxfp4/model.safetensors", FOLDER "gpt_oss-mxfp4/config.json"};
    CASE(test_sources());
    CASE(test_folder());
    CASE(test_options());
    CASE(test_rotary());
    CASE(test_memory(GGUF));
    CASE(test_memory(FOLDER "gpt_oss-mxfp4"));
    CASE(test_memory(FOLDER "lfm2_moe-bf16"));
    CASE(test_taken());
    CASE(test_refusals_gguf());
    CASE(test_refusals_oss());
    CASE(test_refusals_folder());
    CASE(test_foreign());
    CASE(test_bounds());
    CASE(test_packed_layer());
    CASE(test_seed_settings());
    CASE(test_seed_keys());
    CASE(test_gguf_attention());
    CASE(test_folder_keys());
    CASE(test_unscaled());
    CASE(test_unequal_heads());
    CASE(test_narrow());
    CASE(test_missing());
    CASE(test_shared_bytes());
    CASE(test_split_tensors());
    CASE(test_index());
    CASE(test_tuning());
    CASE(test_absent());
    CASE(test_windows());
    CASE(test_layer_lists());
    CASE(test_dimensions());
    CASE(test_parts());
    CASE(test_headers());
    CASE(test_one_bias());
    CASE(test_fp8());
    CASE(test_uneven_scales());
    CASE(test_listed_scales());
    CASE(test_scales_twice());
    CASE(test_bytes(gguf, 1, 0, 2500, 8));
    CASE(test_bytes(gguf_oss, 1, 0, 3500, 12));
    CASE(test_bytes(folder, 2, 0, 9000, 60));
    CASE(test_bytes(folder, 2, 1, 2000, 8));
    CASE(test_reads(gguf, 1, NULL, MOE_OK));
    CASE(test_reads(gguf, 1, "blk.7", MOE_ERR_NOT_FOUND));
    CASE(test_reads(gguf_oss, 1, "blk.1", MOE_OK));
    CASE(test_reads(mxfp4, 2, "model.layers.1", MOE_OK));
    CASE(test_reads(folder, 2, NULL, MOE_OK));
    CASE(test_seed_copied());
    CASE(test_seeds(0));
    CASE(test_seeds(1));
    return test_end();
}
