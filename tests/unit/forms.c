/* forms.c - the forms of attention and of the modules around it that published models use, against
   the definitions in moe.h written out as loops over double; decoding, files and gradients of each.

     cc -std=c99 -O2 -I. tests/unit/forms.c -o forms -lm && ./forms
     (also with -DMOE_REAL=double, which checks gradients) */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { D = 24, V = 11, MOST = 420 };

static moe_rng rng;

#if MOE_REAL_IS_DOUBLE
#define NEAR 1e-10
#else
#define NEAR 1e-4
#endif

/* The forms, as text of the fields. */
static const char *const forms[] = {
    "heads=4",
    "heads=4 rotary=1",
    "heads=4 kv_heads=2 rotary=1",
    "heads=4 kv_heads=1 d_head=10 d_value=7 rotary=1 rotary_dims=6",
    "heads=6 kv_heads=3 d_head=8 bias=1 output_bias=1 rotary=1 rotary_neighbours=1",
    "heads=4 kv_heads=2 qk_norm=whole rotary=1 eps=0.01",
    "heads=4 kv_heads=2 qk_norm=head rotary=1 clamp=0.9",
    "heads=4 kv_heads=2 qk_norm=head norm_after=1 rotary=1 clamp=0.8 bias=1",
    "heads=4 qk_norm=plain norm_after=1 rotary=1 rotary_neighbours=1 query_floor=3 query_growth=0.3",
    "heads=4 kv_heads=2 sinks=1 bias=1 output_bias=1 window=5 rotary=1",
    "heads=4 kv_heads=2 window=70 sinks=1",
    "heads=4 kv_heads=2 chunk=7 rotary=1 query_floor=4",
    "heads=4 kv_heads=2 chunk=90 window=75 cap=2",
    "heads=4 cap=0.7 scale=0.9 sinks=1",
    "heads=4 scale=0.3 clamp=0.5 full=1 kv_heads=2",
    "heads=4 d_head=8 rotary=1 rotary_scaling=linear rotary_factor=4",
    "heads=4 d_head=8 rotary=1 rotary_scaling=yarn rotary_factor=8 rotary_length=16 rotary_base=100",
    "heads=2 d_head=12 rotary=1 rotary_scaling=yarn rotary_factor=8 rotary_length=40 rotary_base=150 no_truncation=1 "
    "beta_fast=8 beta_slow=2 rotary_magnitude=1.2",
    "heads=4 d_head=16 rotary=1 rotary_scaling=llama3 rotary_factor=8 rotary_length=50 rotary_base=500",
    "heads=4 d_head=8 rotary=1 rotary_scaling=factors rotary_dims=6 rotary_magnitude=0.8",
    "heads=3 d_head=10 d_value=5 rotary=1 rotary_dims=4 rotary_neighbours=1 kv_lora=9",
    "heads=3 d_head=10 rotary=1 rotary_dims=6 kv_lora=7 q_lora=8 eps=0.02 scale=0.5 window=9 output_bias=1",
    "heads=2 d_head=6 rotary=1 rotary_dims=2 kv_lora=5 sinks=1 cap=3 chunk=80",
    "heads=4 kv_heads=2 d_head=16 rotary=1 rotary_scaling=llama3 rotary_factor=8 rotary_length=50 low_factor=2 "
    "high_factor=7 full=1 sinks=1 qk_norm=head output_bias=1",
    "heads=3 d_head=8 d_value=6 rotary=1 rotary_dims=4 kv_lora=6 full=1 sinks=1 rotary_scaling=yarn rotary_factor=4 "
    "rotary_length=16 rotary_base=100",
    "heads=2 d_head=8 rotary=1 rotary_dims=4 kv_lora=5 q_lora=6 rotary_scaling=factors query_floor=3 cap=2",
    NULL};

static double *widened(const moe_real *v, size_t n) {
    double *w = (double *)grab(n, sizeof *w);
    size_t i;
    for (i = 0; v != NULL && i < n; i++) w[i] = (double)v[i];
    return w;
}

/* ---- the definition, in the plain form ---- */

static double step_of(const moe_attention_config *c, const moe_real *factors, int i) {
    const double pi = 3.14159265358979323846;
    int n = c->rotary_dims > 0 ? c->rotary_dims : c->d_head;
    double base = (double)c->rotary_base, step = pow(base, -2.0 * i / n);
    double factor = (double)c->rotary_factor;
    if (c->rotary_scaling == MOE_ROTARY_LINEAR) return step / factor;
    if (c->rotary_scaling == MOE_ROTARY_FACTORS) return step / (double)factors[i];
    if (c->rotary_scaling == MOE_ROTARY_YARN) {
        double fast = c->beta_fast > 0 ? (double)c->beta_fast : 32, slow = c->beta_slow > 0 ? (double)c->beta_slow : 1;
        double low = n * log(c->rotary_length / (2 * pi * fast)) / (2 * log(base));
        double high = n * log(c->rotary_length / (2 * pi * slow)) / (2 * log(base)), r;
        if (!c->no_truncation) {
            low = floor(low);
            high = ceil(high);
        }
        low = fmax(low, 0);
        high = fmin(high, n - 1);
        r = 1 - fmin(fmax((i - low) / fmax(0.001, high - low), 0), 1);
        return step / factor * (1 - r) + step * r;
    }
    if (c->rotary_scaling == MOE_ROTARY_LLAMA3) {
        double low = c->low_factor > 0 ? (double)c->low_factor : 1,
               high = c->high_factor > 0 ? (double)c->high_factor : 4;
        double length = 2 * pi / step, s;
        if (length < c->rotary_length / high) return step;
        if (length > c->rotary_length / low) return step / factor;
        s = (c->rotary_length / length - low) / (high - low);
        return step * ((1 - s) / factor + s);
    }
    return step;
}

static void rotate(const moe_attention_config *c, const moe_real *factors, size_t position, double *head) {
    int n = c->rotary_dims > 0 ? c->rotary_dims : c->d_head, i;
    double magnitude = c->rotary_magnitude > 0 ? (double)c->rotary_magnitude : 1;
    if (c->rotary_magnitude <= 0 && c->rotary_scaling == MOE_ROTARY_YARN)
        magnitude = 1 + 0.1 * log((double)c->rotary_factor);
    for (i = 0; i < n / 2 && c->rotary; i++) {
        double angle = (double)position * step_of(c, factors, i);
        double *a = head + (c->rotary_neighbours ? 2 * i : i),
               *b = head + (c->rotary_neighbours ? 2 * i + 1 : n / 2 + i);
        double x = *a, y = *b;
        *a = magnitude * (x * cos(angle) - y * sin(angle));
        *b = magnitude * (x * sin(angle) + y * cos(angle));
    }
}

static void affine(size_t o, size_t n, const moe_real *w, const moe_real *bias, const double *x, double *y) {
    size_t i, j;
    for (i = 0; i < o; i++) {
        y[i] = bias != NULL ? (double)bias[i] : 0;
        for (j = 0; j < n; j++) y[i] += (double)w[i * n + j] * x[j];
    }
}

static void rms(size_t n, double eps, const moe_real *gain, double *x) {
    double sum = 0;
    size_t i;
    for (i = 0; i < n; i++) sum += x[i] * x[i];
    for (i = 0; i < n; i++) x[i] *= (gain != NULL ? (double)gain[i] : 1) / sqrt(sum / (double)n + eps);
}

static double eps_of(const moe_attention_config *c) { return c->eps > 0 ? (double)c->eps : 1e-5; }

static void norm(const moe_attention_config *c, int heads, const moe_real *gain, double *row) {
    int h;
    if (c->qk_norm == MOE_QK_NORM_WHOLE) rms((size_t)(heads * c->d_head), eps_of(c), gain, row);
    else
        for (h = 0; h < heads; h++) rms((size_t)c->d_head, eps_of(c), gain, row + h * c->d_head);
}

static void clamp(const moe_attention_config *c, int n, double *row) {
    int i;
    for (i = 0; i < n && c->clamp > 0; i++) row[i] = fmax(-(double)c->clamp, fmin((double)c->clamp, row[i]));
}

static void finish(const moe_attention_config *c, const moe_module *m, int heads, int place, size_t position,
                   double *row) {
    int h;
    if (c->qk_norm && !c->norm_after) norm(c, heads, m->tensors[place], row);
    clamp(c, heads * c->d_head, row);
    for (h = 0; h < heads; h++)
        rotate(c, m->tensors[MOE_MODULE_ROTARY_FACTORS], position,
               row + h * c->d_head + (c->kv_lora > 0 ? c->d_head - c->rotary_dims : 0));
    if (c->norm_after) norm(c, heads, m->tensors[place], row);
}

/* q, k [H w], v [H u] of a token, every head with its own keys. */
static void heads_of(const moe_module *m, const double *x, size_t position, double *q, double *k, double *v) {
    const moe_attention_config *c = &m->attention;
    moe_real *const *t = m->tensors;
    int H = c->heads, w = c->d_head, h, i;
    int u = c->d_value > 0 ? c->d_value : w, K = c->kv_heads > 0 ? c->kv_heads : H;
    size_t d = (size_t)m->d_in;
    double row[2000], low[200];
    if (c->q_lora > 0) {
        affine((size_t)c->q_lora, d, t[MOE_MODULE_QUERY_DOWN], NULL, x, low);
        rms((size_t)c->q_lora, eps_of(c), t[MOE_MODULE_QUERY_NORM], low);
        affine((size_t)(H * w), (size_t)c->q_lora, t[MOE_MODULE_QUERY], NULL, low, q);
    } else affine((size_t)(H * w), d, t[MOE_MODULE_QUERY], t[MOE_MODULE_QUERY_BIAS], x, q);
    finish(c, m, H, MOE_MODULE_QUERY_NORM, position, q);
    for (i = 0; i < H * w && c->query_floor > 0; i++)
        q[i] *= 1 + (c->query_growth > 0 ? (double)c->query_growth : 0.1) *
                        log(floor((double)(position + 1) / c->query_floor) + 1);
    if (c->kv_lora > 0) {
        int n = w - c->rotary_dims, l = c->kv_lora;
        affine((size_t)(l + c->rotary_dims), d, t[MOE_MODULE_LATENT], NULL, x, row);
        rms((size_t)l, eps_of(c), t[MOE_MODULE_LATENT_NORM], row);
        rotate(c, t[MOE_MODULE_ROTARY_FACTORS], position, row + l);
        for (h = 0; h < H; h++) {
            const moe_real *up = t[MOE_MODULE_KEY] + h * (n + u) * l;
            affine((size_t)n, (size_t)l, up, NULL, row, k + h * w);
            affine((size_t)u, (size_t)l, up + n * l, NULL, row, v + h * u);
            for (i = 0; i < c->rotary_dims; i++) k[h * w + n + i] = row[l + i];
        }
        return;
    }
    affine((size_t)(K * w), d, t[MOE_MODULE_KEY], t[MOE_MODULE_KEY_BIAS], x, row);
    finish(c, m, K, MOE_MODULE_KEY_NORM, position, row);
    for (i = 0; i < H * w; i++) k[i] = row[i / w * K / H * w + i % w];
    affine((size_t)(K * u), d, t[MOE_MODULE_VALUE], t[MOE_MODULE_VALUE_BIAS], x, row);
    clamp(c, K * u, row);
    for (i = 0; i < H * u; i++) v[i] = row[i / u * K / H * u + i % u];
}

/* y [n,d] of one sequence; mask NULL: all tokens are real. */
static double *attention(const moe_module *m, size_t n, const double *x, const unsigned char *mask) {
    const moe_attention_config *c = &m->attention;
    size_t H = (size_t)c->heads, w = (size_t)c->d_head, h, i, j, p;
    size_t u = (size_t)(c->d_value > 0 ? c->d_value : c->d_head), d = (size_t)m->d_in;
    double *q = widened(NULL, n * H * w), *k = widened(NULL, n * H * w);
    double *v = widened(NULL, n * H * u), *y = widened(NULL, n * d);
    double *mixed = widened(NULL, H * u), *s = widened(NULL, n);
    for (i = 0; i < n; i++) heads_of(m, x + i * d, i, q + i * H * w, k + i * H * w, v + i * H * u);
    for (i = 0; i < n; i++) {
        if (mask != NULL && !mask[i]) continue;
        memset(mixed, 0, H * u * sizeof *mixed);
        for (h = 0; h < H; h++) {
            double most = -1e300, sum = 0;
            double sink = c->sinks ? (double)m->tensors[MOE_MODULE_SINKS][h] : 0;
            for (j = 0; j < n; j++) {
                s[j] = -1e300;
                if ((!c->full && j > i) || (c->window > 0 && j + (size_t)c->window <= i) ||
                    (mask != NULL && !mask[j]) || (c->chunk > 0 && j < i - i % (size_t)c->chunk))
                    continue;
                for (s[j] = 0, p = 0; p < w; p++) s[j] += q[(i * H + h) * w + p] * k[(j * H + h) * w + p];
                s[j] *= c->scale > 0 ? (double)c->scale : 1 / sqrt((double)w);
                if (c->cap > 0) s[j] = (double)c->cap * tanh(s[j] / (double)c->cap);
                most = fmax(most, s[j]);
            }
            if (c->sinks) most = fmax(most, sink);
            if (c->sinks) sum = exp(sink - most);
            for (j = 0; j < n; j++) sum += s[j] > -1e299 ? exp(s[j] - most) : 0;
            for (j = 0; j < n; j++)
                for (p = 0; p < u && s[j] > -1e299; p++)
                    mixed[h * u + p] += exp(s[j] - most) / sum * v[(j * H + h) * u + p];
        }
        affine(d, H * u, m->tensors[MOE_MODULE_OUTPUT], m->tensors[MOE_MODULE_OUTPUT_BIAS], mixed, y + i * d);
    }
    free(q);
    free(k);
    free(v);
    free(mixed);
    free(s);
    return y;
}

/* ---- networks ---- */

static int set_fields(const moe_field *fields, void *config, const char *text) {
    moe_error error;
    return CHECK_STATUS(moe_fields_apply(fields, config, text, &error), MOE_OK, error.message);
}

static void shake(moe_net *net) {
    size_t i, k;
    for (i = 0; i < net->n_tensors; i++)
        for (k = 0; k < net->tensors[i].count; k++) {
            moe_real *v = &net->tensors[i].data[k];
            if (strstr(net->tensors[i].name, "rotary_factors") != NULL) *v = (moe_real)(1 + k);
            else if (net->tensors[i].n_dims == 1) *v += (moe_real)0.4 * moe_rng_normal(&rng);
        }
}

/* One attention, on inputs of width D. */
static int make(moe_net *net, const char *form, int trainable) {
    moe_attention_config c;
    moe_error error;
    memset(&c, 0, sizeof c);
    if (!set_fields(test_attention_fields(), &c, form)) return 0;
    moe_net_init(net, D, MOE_KERNELS_AUTO, NULL);
    moe_net_attention(net, &c);
    if (!CHECK_STATUS(moe_net_build(net, trainable, moe_rng_next(&rng), &error), MOE_OK, error.message)) return 0;
    shake(net);
    return 1;
}

static moe_real *run(const moe_net *net, const moe_call *call) {
    size_t bytes = 0, size = call->n_tokens * (size_t)net->d_out * sizeof(moe_real);
    unsigned char *work;
    moe_net_pass pass;
    moe_real *y = reals(call->n_tokens * (size_t)net->d_out);
    CHECK_STATUS(moe_net_work_size(net, call->n_tokens, call->training, &bytes), MOE_OK);
    work = (unsigned char *)grab(bytes + 1, 1);
    memset(work, 0xff, bytes + 1);
    if (CHECK_STATUS(moe_net_forward(net, call, work + 1, bytes, &pass), MOE_OK,
                     call->error != NULL ? call->error->message : ""))
        memcpy(y, pass.y, size);
    free(work);
    return y;
}

/* The larger of two numbers; NaN, which fmax would ignore, is the largest. */
static double larger(double a, double b) { return a >= b || a != a ? a : b; }

static void check_rows(const moe_real *got, const double *wanted, size_t n, double bound) {
    double worst = 0, most = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        worst = larger(worst, fabs((double)got[i] - wanted[i]));
        most = fmax(most, fabs(wanted[i]));
    }
    CHECK_NEAR(worst / (1e-3 + most), 0, bound);
}

/* Decodes n tokens in pieces of so many, 0: of drawn lengths. */
static void check_decoding(moe_net *net, size_t n, size_t piece, int type, const moe_real *x, const moe_real *y,
                           double bound) {
    size_t size = 0, bytes = 0, at, count, i;
    size_t d = (size_t)net->d_in, o = (size_t)net->d_out;
    void *memory, *work;
    moe_cache cache;
    moe_error error;
    double worst = 0, most = 0;
    net->cache_type = type;
    if (!CHECK_STATUS(moe_net_decode_size(net, n, n, &size, &bytes, &error), MOE_OK, error.message)) return;
    memory = grab(size, 1);
    memset(memory, 0xff, size);
    work = grab(bytes, 1);
    CHECK_STATUS(moe_net_cache_init(&cache, net, n, memory, size, &error), MOE_OK);
    for (at = 0; at < n; at += count) {
        moe_call call;
        moe_net_pass pass;
        memset(&call, 0, sizeof call);
        count = piece > 0 ? piece : 1 + (size_t)moe_rng_below(&rng, 90);
        if (count > n - at) count = n - at;
        call.n_tokens = count;
        call.x = x + at * d;
        call.error = &error;
        memset(work, 0xff, bytes);
        if (!CHECK_STATUS(moe_net_decode(net, &cache, &call, work, bytes, &pass), MOE_OK, error.message)) break;
        for (i = 0; i < count * o; i++) {
            worst = larger(worst, fabs((double)(pass.y[i] - y[at * o + i])));
            most = fmax(most, fabs((double)y[at * o + i]));
        }
        if (type == MOE_TYPE_REAL && !CHECK(same_reals(pass.y, y + at * o, count * o), "decoding keeps the bits"))
            break;
    }
    CHECK_NEAR(worst / (1e-3 + most), 0, bound);
    net->cache_type = MOE_TYPE_REAL;
    free(memory);
    free(work);
}

/* A cache is too small once the network has a cache_type of more bytes, or the cache another
   capacity. */
static void check_cache_room(moe_net *net, const int32_t *ids) {
    size_t size = 0, bytes[2] = {0, 0}, grown;
    void *memory, *work;
    moe_cache cache;
    moe_error error;
    net->cache_type = MOE_TYPE_F16;
    CHECK_STATUS(moe_net_decode_size(net, 64, 1, NULL, &bytes[0], &error), MOE_OK);
    net->cache_type = MOE_TYPE_Q8_BLOCK;
    CHECK_STATUS(moe_net_decode_size(net, 64, 1, NULL, &bytes[1], &error), MOE_OK);
    CHECK_STATUS(moe_net_decode_size(net, 32, 1, &size, NULL, &error), MOE_OK);
    memory = grab(size, 1);
    work = grab(bytes[0] + bytes[1], 1);
    for (grown = 0; grown < 3; grown++) { /* as it is, the type changed, the capacity changed */
        moe_call call;
        moe_net_pass pass;
        memset(&call, 0, sizeof call);
        call.n_tokens = 1;
        call.token_ids = ids;
        call.error = &error;
        net->cache_type = MOE_TYPE_Q8_BLOCK;
        CHECK_STATUS(moe_net_cache_init(&cache, net, 32, memory, size, &error), MOE_OK);
        if (grown == 1) net->cache_type = MOE_TYPE_F16;
        if (grown == 2) cache.most = 64;
        CHECK_STATUS(moe_net_decode(net, &cache, &call, work, bytes[0] + bytes[1], &pass),
                     grown == 0 ? MOE_OK : MOE_ERR_SPACE);
        CHECK(cache.n_tokens == (grown == 0 ? 1u : 0u));
    }
    net->cache_type = MOE_TYPE_REAL;
    free(memory);
    free(work);
}

/* A saved network computes what the first one does. */
static void check_file(const moe_net *net, const moe_call *call, const moe_real *y) {
    moe_buffer buffer;
    moe_stream stream;
    moe_net copy;
    moe_error error;
    memset(&buffer, 0, sizeof buffer);
    stream = moe_buffer_stream(&buffer);
    if (CHECK_STATUS(moe_net_write(net, &stream, &error), MOE_OK, error.message) &&
        CHECK_STATUS(moe_net_read(&copy, buffer.data, buffer.size, 0, 0, NULL, &error), MOE_OK, error.message)) {
        moe_real *again = run(&copy, call);
        CHECK(same_reals(y, again, call->n_tokens * (size_t)net->d_out), "a loaded network gives the same bits");
        free(again);
        moe_net_free(&copy);
    }
    moe_buffer_free(&buffer);
}

/* Padding keeps its place, is attended to by no token, and its own rows are not compared. */
static void check_mask(const moe_net *net, const moe_call *whole, const double *wide) {
    const size_t n = whole->n_tokens;
    unsigned char *mask = (unsigned char *)grab(n, 1);
    moe_call call = *whole;
    moe_real *y;
    double *wanted;
    size_t i, real = 0;
    for (i = 0; i < n; i++) mask[i] = i % 3 != 1;
    call.mask = mask;
    y = run(net, &call);
    wanted = attention(&net->modules[0], n, wide, mask);
    for (i = 0; i < n; i++) { /* the real rows, one after another */
        if (!mask[i]) continue;
        memmove(y + real * D, y + i * D, D * sizeof *y);
        memmove(wanted + real++ * D, wanted + i * D, D * sizeof *wanted);
    }
    check_rows(y, wanted, real * D, NEAR);
    free(mask);
    free(y);
    free(wanted);
}

static void test_form(const char *form, size_t n) {
    moe_net net;
    moe_call call;
    moe_error error;
    moe_real *x = normals_of(&rng, n * D, 1), *y, *one;
    double *wide, *wanted;
    int full;
    memset(&call, 0, sizeof call);
    if (!make(&net, form, 0)) return;
    full = net.modules[0].attention.full;
    call.n_tokens = n;
    call.x = x;
    call.error = &error;
    y = run(&net, &call);
    wide = widened(x, n * D);
    wanted = attention(&net.modules[0], n, wide, NULL);
    check_rows(y, wanted, n * D, NEAR);
    call.n_tokens = 1;
    one = run(&net, &call);
    if (!full) CHECK(same_reals(one, y, D), "a token depends on earlier ones alone");
    call.n_tokens = n;
    check_mask(&net, &call, wide);
    if (!full) {
        check_decoding(&net, n, 1, MOE_TYPE_REAL, x, y, 0);
        check_decoding(&net, n, n, MOE_TYPE_REAL, x, y, 0);
        check_decoding(&net, n, 0, MOE_TYPE_REAL, x, y, 0);
        check_decoding(&net, n, 0, MOE_TYPE_F16, x, y, 0.02);
        check_decoding(&net, n, 1, MOE_TYPE_BF16, x, y, 0.1);
        check_decoding(&net, n, 0, MOE_TYPE_Q8_BLOCK, x, y, 0.1);
    }
    check_file(&net, &call, y);
    free(x);
    free(y);
    free(one);
    free(wide);
    free(wanted);
    moe_net_free(&net);
}

static void test_forms(void) {
    size_t i;
    for (i = 0; forms[i] != NULL; i++) {
        test_case(forms[i]);
        test_form(forms[i], 23);
        test_form(forms[i], i % 3 == 0 ? MOST : 150);
    }
}

/* ---- the other modules ---- */

static moe_module module_of(int kind) {
    moe_module m;
    memset(&m, 0, sizeof m);
    m.kind = kind;
    return m;
}

/* scale, rms_norm with bias, convolution, residual, layer_norm, linear, cap. */
static int make_stack(moe_net *net, int length, int trainable) {
    moe_error error;
    moe_module m = module_of(MOE_MODULE_SCALE);
    moe_net_init(net, D, MOE_KERNELS_AUTO, NULL);
    m.scale = (moe_real)1.5;
    moe_net_append(net, &m);
    m = module_of(MOE_MODULE_RMS_NORM);
    m.eps = (moe_real)0.25;
    m.bias = 1;
    moe_net_append(net, &m);
    m = module_of(MOE_MODULE_CONVOLUTION);
    m.length = length;
    moe_net_append(net, &m);
    moe_net_residual(net, 2);
    m = module_of(MOE_MODULE_LAYER_NORM);
    m.eps = (moe_real)0.5;
    m.no_bias = 1;
    moe_net_append(net, &m);
    m = module_of(MOE_MODULE_LINEAR);
    m.d_out = 7;
    m.no_bias = 1;
    moe_net_append(net, &m);
    m = module_of(MOE_MODULE_SCALE);
    m.scale = (moe_real)-0.8;
    m.cap = (moe_real)1.25;
    moe_net_append(net, &m);
    if (!CHECK_STATUS(moe_net_build(net, trainable, 9, &error), MOE_OK, error.message)) return 0;
    shake(net);
    return 1;
}

/* The definition, for one sequence. */
static double *stack(const moe_net *net, size_t n, const moe_real *x) {
    const moe_module *m = net->modules;
    size_t L = (size_t)m[2].length, t, c, i;
    double *u = widened(NULL, n * D), *y = widened(NULL, n * 7);
    for (t = 0; t < n; t++) {
        double row[D], parts[3 * D], mixed[D], out[D], scaled[D], mean = 0, var = 0;
        for (c = 0; c < D; c++) row[c] = scaled[c] = 1.5 * (double)x[t * D + c];
        rms(D, 0.25, m[1].tensors[MOE_MODULE_WEIGHT], row);
        for (c = 0; c < D; c++) row[c] += (double)m[1].tensors[MOE_MODULE_BIAS][c];
        affine(3 * D, D, m[2].tensors[MOE_MODULE_IN], NULL, row, parts);
        for (c = 0; c < D; c++) {
            u[t * D + c] = parts[c] * parts[2 * D + c];
            for (mixed[c] = 0, i = 0; i < L; i++)
                if (t + i + 1 >= L)
                    mixed[c] += (double)m[2].tensors[MOE_MODULE_TAPS][c * L + i] * u[(t + i + 1 - L) * D + c];
            mixed[c] *= parts[D + c];
        }
        affine(D, D, m[2].tensors[MOE_MODULE_OUT], NULL, mixed, out);
        for (c = 0; c < D; c++) mean += (out[c] += scaled[c]) / D;
        for (c = 0; c < D; c++) var += (out[c] - mean) * (out[c] - mean) / D;
        for (c = 0; c < D; c++) out[c] = (out[c] - mean) / sqrt(var + 0.5) * (double)m[4].tensors[MOE_MODULE_WEIGHT][c];
        affine(7, D, m[5].tensors[MOE_MODULE_WEIGHT], NULL, out, y + t * 7);
        for (c = 0; c < 7; c++) y[t * 7 + c] = 1.25 * tanh(-0.8 * y[t * 7 + c] / 1.25);
    }
    free(u);
    return y;
}

static void test_stack(int length, size_t n) {
    moe_net net;
    moe_call call;
    moe_real *x = normals_of(&rng, n * D, 1), *y;
    double *wanted;
    memset(&call, 0, sizeof call);
    if (!make_stack(&net, length, 0)) return;
    call.n_tokens = n;
    call.x = x;
    y = run(&net, &call);
    wanted = stack(&net, n, x);
    check_rows(y, wanted, n * 7, NEAR);
    check_decoding(&net, n, 1, MOE_TYPE_REAL, x, y, 0);
    check_decoding(&net, n, 2, MOE_TYPE_F16, x, y, 0);
    check_decoding(&net, n, 0, MOE_TYPE_REAL, x, y, 0);
    check_file(&net, &call, y);
    free(x);
    free(y);
    free(wanted);
    moe_net_free(&net);
}

/* ---- tensors of the caller ---- */

static void unpack(const moe_kernels *k, const moe_external *w, size_t row, size_t from, size_t count,
                   moe_real *values) {
    (void)k;
    memcpy(values, w->data + row * w->row + from * sizeof(moe_real), count * sizeof(moe_real));
}

static moe_external matrix_of(const moe_real *values, size_t columns) {
    static const moe_external_type type = {"test", 1, (int)sizeof(moe_real), unpack, 0, 0, NULL, NULL};
    moe_external w;
    memset(&w, 0, sizeof w);
    w.type = &type;
    w.data = (const unsigned char *)values;
    w.row = columns * sizeof(moe_real);
    w.column = sizeof(moe_real);
    w.exact = 1;
    return w;
}

/* The tensors of *from for a network of the caller's tensors; way 1: matrices are external, 2: and
   those of MLA are two, of which the keys are transposed. */
static void lend(moe_net *to, const moe_net *from, int way, moe_external *places, moe_real **memory) {
    moe_module *m = &to->modules[0];
    const moe_attention_config *c = &m->attention;
    size_t n = (size_t)(c->d_head - c->rotary_dims), l = (size_t)c->kv_lora, h, i, j;
    size_t u = (size_t)(c->d_value > 0 ? c->d_value : c->d_head);
    const moe_real *joint = from->modules[0].tensors[MOE_MODULE_KEY];
    int place;
    *memory = NULL;
    memset(places, 0, MOE_MODULE_SLOTS * sizeof *places);
    for (place = 0, i = 0; place < MOE_MODULE_SLOTS; place++) {
        if (from->modules[0].tensors[place] == NULL) continue;
        if (way > 0 && from->tensors[i].n_dims == 2)
            places[place] = matrix_of(from->tensors[i].data, from->tensors[i].shape[1]);
        else m->tensors[place] = from->tensors[i].data;
        i++;
    }
    if (way > 0) m->external = places;
    if (way < 2 || l == 0) return;
    *memory = reals((size_t)c->heads * (n + u) * l);
    for (h = 0; h < (size_t)c->heads; h++) {
        moe_real *keys = *memory + h * n * l, *values = *memory + ((size_t)c->heads * n + h * u) * l;
        for (i = 0; i < n; i++)
            for (j = 0; j < l; j++) keys[j * n + i] = joint[(h * (n + u) + i) * l + j];
        memcpy(values, joint + (h * (n + u) + n) * l, u * l * sizeof *values);
    }
    places[MOE_MODULE_KEY] = matrix_of(*memory, n);
    places[MOE_MODULE_VALUE] = matrix_of(*memory + (size_t)c->heads * n * l, l);
}

static void test_lent(const char *form, int way) {
    moe_external places[MOE_MODULE_SLOTS];
    moe_real *x = normals_of(&rng, 30 * D, 1), *memory = NULL, *y, *again, *later;
    void *packed = NULL;
    double *wanted = widened(NULL, 30 * D);
    moe_net net, lent;
    moe_call call;
    moe_error error;
    size_t i, bytes = 0;
    memset(&call, 0, sizeof call);
    call.n_tokens = 30;
    call.x = x;
    call.error = &error;
    if (!make(&net, form, 0)) return;
    y = run(&net, &call);
    moe_net_init(&lent, D, MOE_KERNELS_AUTO, NULL);
    lent.external = 1;
    moe_net_attention(&lent, &net.modules[0].attention);
    CHECK_STATUS(moe_net_build(&lent, 1, 0, &error), MOE_ERR_UNSUPPORTED);
    if (CHECK_STATUS(moe_net_build(&lent, 0, 0, &error), MOE_OK, error.message)) {
        moe_net_pass pass;
        moe_buffer buffer;
        moe_stream stream;
        memset(&buffer, 0, sizeof buffer);
        stream = moe_buffer_stream(&buffer);
        CHECK(lent.memory == NULL);
        CHECK_STATUS(moe_net_work_size(&lent, 30, 0, &bytes), MOE_OK);
        CHECK_STATUS(moe_net_forward(&lent, &call, x, bytes, &pass), MOE_ERR_STATE);
        CHECK(strstr(error.message, "query is not set") != NULL, error.message);
        CHECK_STATUS(moe_net_pack_size(&lent, MOE_TYPE_REAL, 0, &bytes, NULL), MOE_OK);
        packed = grab(bytes, 1);
        CHECK_STATUS(moe_net_pack(&lent, MOE_TYPE_REAL, packed, bytes, &error), MOE_ERR_ARGUMENT);
        CHECK(strstr(error.message, "module 0 (attention): query is not set") != NULL, error.message);
        lend(&lent, &net, way, places, &memory);
        again = run(&lent, &call);
        for (i = 0; i < 30 * D; i++) wanted[i] = (double)y[i];
        check_rows(again, wanted, 30 * D, way < 2 ? 0 : NEAR);
        if (!lent.modules[0].attention.full) check_decoding(&lent, 30, 4, MOE_TYPE_REAL, x, again, 0);
        /* only tensors are packed, and keep all bits */
        CHECK_STATUS(moe_net_pack(&lent, MOE_TYPE_REAL, packed, bytes, &error), MOE_OK);
        CHECK((way > 0) == (lent.modules[0].layer.packed[MOE_MODULE_QUERY] == NULL));
        later = run(&lent, &call);
        CHECK(memcmp(later, again, 30 * D * sizeof *later) == 0);
        free(later);
        lent.modules[0].layer.is_packed = 0;
        CHECK_STATUS(moe_net_write(&lent, &stream, &error), MOE_ERR_STATE);
        call.training = 1;
        CHECK_STATUS(moe_net_forward(&lent, &call, x, bytes, &pass), MOE_ERR_UNSUPPORTED);
        free(again);
        moe_buffer_free(&buffer);
    }
    free(x);
    free(y);
    free(wanted);
    free(memory);
    free(packed);
    moe_net_free(&net);
    moe_net_free(&lent);
}

/* An embedding and logits from one matrix of the caller's. */
static void test_lent_words(void) {
    moe_external place[2][MOE_MODULE_SLOTS];
    moe_real *y, *again;
    int32_t ids[6] = {3, 0, 10, 3, 7, 1};
    moe_net net, lent;
    moe_call call;
    moe_error error;
    int i;
    memset(&call, 0, sizeof call);
    memset(place, 0, sizeof place);
    call.n_tokens = 6;
    call.token_ids = ids;
    for (i = 0; i < 2; i++) {
        moe_net *made = i ? &lent : &net;
        moe_module m = module_of(MOE_MODULE_TIED);
        moe_net_init(made, 0, MOE_KERNELS_AUTO, NULL);
        made->external = i;
        moe_net_embedding(made, V, 8);
        moe_net_linear(made, 8);
        m.no_bias = 1;
        moe_net_append(made, &m);
        CHECK_STATUS(moe_net_build(made, 0, 3, &error), MOE_OK, error.message);
    }
    y = run(&net, &call);
    place[0][MOE_MODULE_WEIGHT] = matrix_of(net.tensors[0].data, 8);
    place[1][MOE_MODULE_WEIGHT] = matrix_of(net.tensors[1].data, 8);
    lent.modules[0].external = place[0];
    lent.modules[1].external = place[1];
    lent.modules[1].tensors[MOE_MODULE_BIAS] = net.tensors[2].data;
    again = run(&lent, &call);
    CHECK(same_reals(y, again, 6 * V));
    free(y);
    free(again);
    moe_net_free(&net);
    moe_net_free(&lent);
}

/* What is read as a tensor must be one: vectors, positions, taps, an output that a router reads. */
static void test_lent_tensors(void) {
    static const int kinds[][2] = {{MOE_MODULE_RMS_NORM, MOE_MODULE_WEIGHT},
                                   {MOE_MODULE_POSITIONS, MOE_MODULE_WEIGHT},
                                   {MOE_MODULE_CONVOLUTION, MOE_MODULE_TAPS},
                                   {MOE_MODULE_ATTENTION, MOE_MODULE_OUTPUT}};
    moe_external places[MOE_MODULE_SLOTS];
    moe_real *x = normals_of(&rng, 5 * D, 1), *y, *again;
    moe_layer_config mixture;
    moe_net nets[2];
    moe_net_pass pass;
    moe_call call;
    moe_error error;
    size_t i, k, bytes = 0;
    void *work;
    memset(&call, 0, sizeof call);
    memset(&mixture, 0, sizeof mixture);
    mixture.router.refine = MOE_REFINE_ATTENTION;
    call.n_tokens = 5;
    call.x = x;
    call.error = &error;
    for (k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        moe_module m = module_of(kinds[k][0]);
        m.n_rows = m.length = 6;
        for (i = 0; i < 2; i++) {
            moe_net_init(&nets[i], D, MOE_KERNELS_AUTO, NULL);
            nets[i].external = (int)i;
            moe_net_append(&nets[i], &m);
            if (m.kind == MOE_MODULE_ATTENTION) moe_net_mixture(&nets[i], &mixture);
            CHECK_STATUS(moe_net_build(&nets[i], 0, 3, &error), MOE_OK, error.message);
            memcpy(nets[i].modules[0].tensors, nets[0].modules[0].tensors, sizeof nets[0].modules[0].tensors);
            if (nets[i].n_modules > 1)
                memcpy(nets[i].modules[1].layer.tensors, nets[0].modules[1].layer.tensors,
                       sizeof nets[0].modules[1].layer.tensors);
        }
        y = run(&nets[0], &call);
        memset(places, 0, sizeof places);
        places[kinds[k][1]] = matrix_of(nets[0].modules[0].tensors[kinds[k][1]], D);
        nets[1].modules[0].external = places;
        again = run(&nets[1], &call);
        CHECK(same_reals(y, again, 5 * D));
        nets[1].modules[0].tensors[kinds[k][1]] = NULL;
        CHECK_STATUS(moe_net_work_size(&nets[1], 5, 0, &bytes), MOE_OK);
        work = grab(bytes, 1);
        CHECK_STATUS(moe_net_forward(&nets[1], &call, work, bytes, &pass), MOE_ERR_STATE);
        CHECK(strstr(error.message, "is not set") != NULL, error.message);
        free(work);
        free(y);
        free(again);
        moe_net_free(&nets[0]);
        moe_net_free(&nets[1]);
    }
    free(x);
}

static int make_words(moe_net *net) {
    moe_module m = module_of(MOE_MODULE_TIED);
    moe_layer_config mixture;
    moe_error error;
    int i;
    memset(&mixture, 0, sizeof mixture);
    mixture.router.n_experts = 4;
    moe_net_init(net, 0, MOE_KERNELS_AUTO, NULL);
    moe_net_embedding(net, V, 8);
    for (i = 0; i < 3; i++) {
        moe_net_rms_norm(net);
        moe_net_attention(net, NULL);
        moe_net_residual(net, 2);
        moe_net_rms_norm(net);
        moe_net_mixture(net, &mixture);
        moe_net_residual(net, i > 0 ? 5 : 2);
    }
    moe_net_rms_norm(net);
    m.no_bias = 1;
    moe_net_append(net, &m);
    m = module_of(MOE_MODULE_SCALE);
    m.scale = 2;
    moe_net_append(net, &m);
    if (!CHECK_STATUS(moe_net_build(net, 0, 3, &error), MOE_OK, error.message)) return 0;
    return 1;
}

/* With last_only a prompt gives the last token's logits, in less memory. */
static void test_last_only(void) {
    enum { N = 21 };
    int32_t ids[N];
    size_t size = 0, bytes[2] = {0, 0}, i;
    void *memory, *work;
    moe_real *y;
    moe_net net;
    moe_call call;
    moe_cache cache;
    moe_net_pass pass;
    moe_error error;
    for (i = 0; i < N; i++) ids[i] = (int32_t)(i * i % V);
    memset(&call, 0, sizeof call);
    call.n_tokens = N;
    call.token_ids = ids;
    call.error = &error;
    if (!make_words(&net)) return;
    y = run(&net, &call);
    for (net.last_only = 0; net.last_only < 2; net.last_only++) {
        const size_t rows = net.last_only ? 1 : N;
        CHECK_STATUS(moe_net_decode_size(&net, N, N, &size, &bytes[net.last_only], &error), MOE_OK);
        memory = grab(size, 1);
        work = grab(bytes[net.last_only], 1);
        CHECK_STATUS(moe_net_cache_init(&cache, &net, N, memory, size, &error), MOE_OK);
        memset(work, 0xff, bytes[net.last_only]);
        CHECK_STATUS(moe_net_decode(&net, &cache, &call, work, bytes[net.last_only], &pass), MOE_OK, error.message);
        CHECK(same_reals(pass.y, y + (N - rows) * V, rows * V));
        for (i = 0; i < 3; i++) {
            const moe_routing *routing = moe_net_routing(&net, &pass, 5 + 6 * i);
            CHECK(routing != NULL && routing->n_tokens == N && routing->n_choices[N - 1] == 2);
        }
        free(memory);
        free(work);
    }
    CHECK(bytes[1] < bytes[0]);
    free(y);
    check_cache_room(&net, ids);
    net.cache_type = MOE_TYPE_Q4;
    CHECK_STATUS(moe_net_decode_size(&net, N, N, &size, &bytes[0], &error), MOE_ERR_ARGUMENT);
    moe_net_free(&net);
}

/* ---- what is refused ---- */

static void check_refused(const char *form, const char *word) {
    moe_attention_config c;
    moe_net net;
    moe_error error;
    memset(&c, 0, sizeof c);
    if (!set_fields(test_attention_fields(), &c, form)) return;
    moe_net_init(&net, D, MOE_KERNELS_AUTO, NULL);
    moe_net_attention(&net, &c);
    CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_ERR_CONFIG);
    CHECK(strstr(error.message, word) != NULL, error.message);
    moe_net_free(&net);
}

static void test_refused(void) {
    static const char *const rows[][2] = {
        {"heads=4 kv_heads=3", "kv_heads = 3: must divide heads = 4"},
        {"heads=4 rotary_dims=4", "rotary_dims = 4 is incompatible with rotary = 0"},
        {"heads=4 rotary=1 rotary_dims=5", "rotary_dims = 5"},
        {"heads=4 rotary=1 rotary_dims=8", "rotary_dims = 8"},
        {"heads=4 rotary=1 rotary_factor=2", "rotary_factor = 2 is incompatible with rotary_scaling = none"},
        {"heads=4 rotary=1 rotary_scaling=yarn", "rotary_length = 0"},
        {"heads=4 rotary=1 rotary_scaling=llama3", "rotary_length = 0"},
        {"heads=4 norm_after=1", "norm_after = 1 is incompatible with qk_norm = none"},
        {"heads=4 window=3 full=1", "window = 3 is incompatible with full = 1"},
        {"heads=4 chunk=3 full=1", "chunk = 3 is incompatible with full = 1"},
        {"heads=4 query_growth=3", "query_growth = 3 is incompatible with query_floor = 0"},
        {"heads=4 q_lora=3", "q_lora = 3 is incompatible with kv_lora = 0"},
        {"heads=4 kv_lora=3", "kv_lora = 3 is incompatible with rotary = 0"},
        {"heads=4 kv_lora=3 rotary=1", "kv_lora = 3 is incompatible with rotary_dims = 0"},
        {"heads=4 d_head=4 kv_lora=3 rotary=1 rotary_dims=4", "rotary_dims = 4"},
        {"heads=4 kv_lora=3 rotary=1 rotary_dims=2 bias=1", "kv_lora = 3 is incompatible with bias = 1"},
        {"heads=4 kv_lora=3 rotary=1 rotary_dims=2 qk_norm=head", "incompatible with qk_norm = head"},
        {"heads=4000 d_head=16 rotary=1 rotary_dims=2 kv_lora=5000", "kv_lora = 5000"},
        {"heads=4000 d_head=1 d_value=5000", "d_value = 5000"},
        {"heads=4 window=-1", "window = -1"}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) check_refused(rows[i][0], rows[i][1]);
}

/* Modules that append refuses. */
static void test_refused_modules(void) {
    static const struct {
        int kind, length, no_bias;
        double eps;
        const char *word;
    } rows[] = {{MOE_MODULE_CONVOLUTION, 0, 0, 0, "length = 0: must be 1 to 64"},
                {MOE_MODULE_CONVOLUTION, 65, 0, 0, "length = 65"},
                {MOE_MODULE_RMS_NORM, 0, 0, 2, "eps = 2"},
                {MOE_MODULE_LAYER_NORM, 0, 3, 0, "no_bias = 3"}};
    moe_error error;
    moe_net net;
    size_t i;
    for (i = 0; i < sizeof rows / sizeof *rows; i++) {
        moe_module m = module_of(rows[i].kind);
        m.length = rows[i].length;
        m.no_bias = rows[i].no_bias;
        m.eps = (moe_real)rows[i].eps;
        moe_net_init(&net, D, MOE_KERNELS_AUTO, NULL);
        moe_net_append(&net, &m);
        CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_ERR_CONFIG);
        CHECK(strstr(error.message, rows[i].word) != NULL, error.message);
        CHECK_STATUS(moe_net_append(&net, NULL), MOE_ERR_CONFIG);
        moe_net_free(&net);
    }
    for (i = 0; i < 3; i++) { /* build fails as the call that appended nothing */
        moe_module m = module_of(i == 0 ? -1 : MOE_MODULE_COUNT);
        moe_net_init(&net, D, MOE_KERNELS_AUTO, NULL);
        moe_net_linear(&net, D);
        CHECK_STATUS(moe_net_append(&net, i == 2 ? NULL : &m), MOE_ERR_ARGUMENT);
        CHECK_STATUS(moe_net_build(&net, 0, 1, &error), MOE_ERR_ARGUMENT);
        CHECK(strncmp(error.message, "module 1: ", 10) == 0, error.message);
        moe_net_free(&net);
    }
}

/* A window keeps no more than it needs, and says so to who goes back too far. */
static void test_window_cache(void) {
    enum { LONG = 900 };
    moe_real *x = normals_of(&rng, LONG * D, 1);
    size_t sizes[2] = {0, 0}, bytes = 0;
    moe_net net;
    moe_cache cache;
    moe_call call;
    moe_net_pass pass;
    moe_error error;
    void *memory, *work;
    if (!make(&net, "heads=4 window=10", 0)) return;
    CHECK_STATUS(moe_net_decode_size(&net, LONG, LONG, &sizes[0], &bytes, &error), MOE_OK);
    CHECK_STATUS(moe_net_decode_size(&net, 8 * LONG, LONG, &sizes[1], NULL, &error), MOE_OK);
    CHECK(sizes[0] == sizes[1] && sizes[0] < 400 * 2 * D * sizeof(moe_real));
    memory = grab(sizes[0], 1);
    work = grab(bytes, 1);
    memset(&call, 0, sizeof call);
    call.x = x;
    call.n_tokens = LONG;
    call.error = &error;
    CHECK_STATUS(moe_net_cache_init(&cache, &net, LONG, memory, sizes[0], &error), MOE_OK);
    CHECK_STATUS(moe_net_decode(&net, &cache, &call, work, bytes, &pass), MOE_OK);
    cache.n_tokens = 400;
    call.n_tokens = 1;
    CHECK_STATUS(moe_net_decode(&net, &cache, &call, work, bytes, &pass), MOE_ERR_STATE);
    CHECK(strstr(error.message, "cache.n_tokens = 400") != NULL, error.message);
    cache.n_tokens = LONG - 1;
    CHECK_STATUS(moe_net_decode(&net, &cache, &call, work, bytes, &pass), MOE_OK);
    cache.n_tokens = 0;
    call.n_tokens = 7;
    CHECK_STATUS(moe_net_decode(&net, &cache, &call, work, bytes, &pass), MOE_OK);
    free(memory);
    free(work);
    moe_net_free(&net);
    if (!make_stack(&net, 3, 0)) return;
    CHECK_STATUS(moe_net_decode_size(&net, LONG, 7, &sizes[0], &bytes, &error), MOE_OK);
    memory = grab(sizes[0], 1);
    work = grab(bytes, 1);
    CHECK_STATUS(moe_net_cache_init(&cache, &net, LONG, memory, sizes[0], &error), MOE_OK);
    CHECK_STATUS(moe_net_decode(&net, &cache, &call, work, bytes, &pass), MOE_OK);
    CHECK_STATUS(moe_net_decode(&net, &cache, &call, work, bytes, &pass), MOE_OK);
    cache.n_tokens = 7;
    CHECK_STATUS(moe_net_decode(&net, &cache, &call, work, bytes, &pass), MOE_OK);
    cache.n_tokens = 3;
    CHECK_STATUS(moe_net_decode(&net, &cache, &call, work, bytes, &pass), MOE_ERR_STATE);
    CHECK(strstr(error.message, "cache.n_tokens = 3") != NULL, error.message);
    free(memory);
    free(work);
    free(x);
    moe_net_free(&net);
}

#if MOE_REAL_IS_DOUBLE
/* ---- gradients, by central differences along every number ---- */

static double loss(const moe_net *net, moe_call *call, const moe_real *weights) {
    moe_real *y = run(net, call);
    double sum = 0;
    size_t i;
    for (i = 0; i < call->n_tokens * (size_t)net->d_out; i++) sum += y[i] * weights[i];
    free(y);
    return sum;
}

/* The differences of `count` numbers at `value`, every `step`-th, against the gradient. */
static void check_slopes(const moe_net *net, moe_call *call, const moe_real *weights, moe_real *value,
                         const moe_real *gradient, size_t count, const char *name) {
    size_t step = count / 12 + 1, i;
    double most = 1e-3;
    for (i = 0; i < count; i++) most = fmax(most, fabs(gradient[i]));
    for (i = (size_t)moe_rng_below(&rng, step); i < count; i += step) {
        double kept = value[i], h = 1e-5, up, down;
        value[i] = kept + h;
        up = loss(net, call, weights);
        value[i] = kept - h;
        down = loss(net, call, weights);
        value[i] = kept;
        CHECK_NEAR_AT(__LINE__, ((up - down) / (2 * h) - gradient[i]) / most, 0, 2e-7, name);
    }
}

/* Gradients of all tensors of a network and of its input. */
static void check_gradients(moe_net *net, moe_call *call) {
    size_t n = call->n_tokens, d = (size_t)net->d_in, bytes, i;
    moe_real *weights = normals_of(&rng, n * (size_t)net->d_out, 1), *dx = reals(n * d + 1);
    moe_net_pass pass;
    void *work;
    call->training = 1;
    CHECK_STATUS(moe_net_work_size(net, n, 1, &bytes), MOE_OK);
    work = grab(bytes, 1);
    memset(work, 0xff, bytes);
    if (CHECK_STATUS(moe_net_forward(net, call, work, bytes, &pass), MOE_OK) &&
        CHECK_STATUS(moe_net_backward(net, weights, dx, &pass), MOE_OK)) {
        call->training = 0;
        for (i = 0; i < net->n_tensors; i++)
            if (net->tensors[i].flags != (MOE_PARAM_FROZEN | MOE_PARAM_NO_DECAY))
                check_slopes(net, call, weights, net->tensors[i].data, net->tensors[i].gradient, net->tensors[i].count,
                             net->tensors[i].name);
        check_slopes(net, call, weights, (moe_real *)call->x, dx, n * d, "x");
    }
    call->training = 0;
    free(work);
    free(weights);
    free(dx);
}

/* Those of an attention that a router reads. */
static void check_read(const char *form, moe_call *call) {
    moe_attention_config a;
    moe_layer_config c;
    moe_net net;
    moe_error error;
    memset(&a, 0, sizeof a);
    memset(&c, 0, sizeof c);
    if (!set_fields(test_attention_fields(), &a, form) ||
        !set_fields(moe_layer_fields(), &c,
                    "n_experts=3 d_ff=4 select=dense refine=attention attention_heads=all attention_u=output"))
        return;
    moe_net_init(&net, D, MOE_KERNELS_AUTO, NULL);
    moe_net_attention(&net, &a);
    moe_net_mixture(&net, &c);
    if (CHECK_STATUS(moe_net_build(&net, 1, moe_rng_next(&rng), &error), MOE_OK, error.message)) {
        shake(&net);
        check_gradients(&net, call);
    }
    moe_net_free(&net);
}

static void test_gradients(void) {
    static const int32_t sequences[] = {0, 5, 5, 13, 14};
    static const unsigned char mask[] = {1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1};
    size_t i, k;
    for (i = 0; forms[i] != NULL; i++)
        for (k = 0; k < 3; k++) {
            const size_t n = k < 2 ? 14 : 150; /* for windows and chunks of 70 tokens and more */
            moe_net net;
            moe_call call;
            moe_real *x;
            if (k == 2 && strstr(forms[i], "window=7") == NULL && strstr(forms[i], "chunk=8") == NULL) continue;
            x = normals_of(&rng, n * D, 1);
            test_case(forms[i]);
            memset(&call, 0, sizeof call);
            call.n_tokens = n;
            call.x = x;
            if (k == 1) {
                call.sequences = sequences;
                call.n_sequences = 4;
                call.mask = mask;
            }
            if (make(&net, forms[i], 1)) check_gradients(&net, &call);
            moe_net_free(&net);
            if (strstr(forms[i], "kv_lora") == NULL) check_read(forms[i], &call); /* others are refused */
            test_case("stack");
            if (i < 3 && make_stack(&net, (int)(2 * i + 1), 1)) {
                check_gradients(&net, &call);
                moe_net_free(&net);
            }
            free(x);
        }
}
#endif

/* A router whose matrix lies in a file gives the bits of the tensor; where it cannot be read there
   the tensor is missing. */
static void test_router_in_file(void) {
    enum { E = 5, WIDE = 12, N = 7 };
    static const struct {
        int score, bound, training, quantizes;
    } refused[] = {{MOE_SCORE_COSINE, 0, 0, 0}, {0, MOE_BOUND_EVERY, 0, 0}, {0, 0, 1, 0}, {0, 0, 0, 1}};
    moe_real weight[(int)E * WIDE] = {0}, x[(int)N * WIDE], logits[(int)N * E];
    moe_external w = matrix_of(weight, WIDE);
    moe_external_type blocks = *w.type;
    moe_router_config config;
    moe_router router;
    moe_routing routing;
    moe_call call;
    moe_error error;
    size_t size, i;
    moe_rng_seed(&rng, 3);
    for (i = 0; i < sizeof weight / sizeof *weight; i++) weight[i] = moe_rng_normal(&rng);
    for (i = 0; i < sizeof x / sizeof *x; i++) x[i] = moe_rng_normal(&rng);
    memset(&call, 0, sizeof call);
    call.x = x;
    call.n_tokens = N;
    call.error = &error;
    blocks.group = 32;
    w.exact = 0;
    for (i = 0; i < 2 + sizeof refused / sizeof *refused; i++) {
        void *work;
        memset(&config, 0, sizeof config);
        config.d_model = WIDE;
        config.n_experts = E;
        w.type = matrix_of(weight, WIDE).type;
        if (i > 1) {
            config.score = refused[i - 2].score;
            config.capacity_bound = refused[i - 2].bound;
            if (refused[i - 2].quantizes) w.type = &blocks;
        }
        call.training = i > 1 && refused[i - 2].training;
        if (!CHECK(moe_router_init(&router, &config, moe_kernels_select(MOE_KERNELS_AUTO), &error) == MOE_OK,
                   error.message))
            return;
        if (i > 0) router.external = &w;
        else router.tensors[MOE_ROUTER_WEIGHT] = weight;
        CHECK_STATUS(moe_route_size(&router, N, call.training, &size), MOE_OK);
        work = grab(size, 1);
        if (i > 1) {
            CHECK_STATUS(moe_route(&router, &call, work, size, &routing), MOE_ERR_ARGUMENT);
            CHECKF(strstr(error.message, "router.weight") != NULL, "%s", error.message);
        } else {
            CHECK(moe_route(&router, &call, work, size, &routing) == MOE_OK, error.message);
            if (i == 0) memcpy(logits, routing.logits, sizeof logits);
            CHECK(memcmp(logits, routing.logits, sizeof logits) == 0);
        }
        free(work);
    }
}

int main(void) {
    size_t i;
    int way;
    moe_rng_seed(&rng, 5);
    test_forms();
    CASE(test_stack(1, 9));
    CASE(test_stack(3, 40));
    CASE(test_stack(8, 100));
    for (i = 0; forms[i] != NULL; i++)
        for (way = 0; way < 3; way++) CASE(test_lent(forms[i], way));
    CASE(test_lent_words());
    CASE(test_lent_tensors());
    CASE(test_last_only());
    CASE(test_refused());
    CASE(test_refused_modules());
    CASE(test_window_cache());
#if MOE_REAL_IS_DOUBLE
    test_gradients();
#endif
    CASE(test_router_in_file());
    return test_end();
}
