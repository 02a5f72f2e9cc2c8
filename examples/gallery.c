/* Draws how every preset splits the same plane between its experts, and writes a page of all of
   them: examples/gallery/README.md.
     cc -std=c99 -O2 -I. examples/gallery.c -o gallery -lm && ./gallery -o FOLDER
     (or: sh examples/run gallery) */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include "report.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] = "gallery [options]   trains each preset on the same points of a plane, draws where each "
                           "expert is the first choice (NAME.svg),\n"
                           "                    and writes README.md with formulas, traits, sources and the pictures\n"
                           "  -o FOLDER         an existing folder (examples/gallery)\n"
                           "  --preset NAME     only this one; the page is not written\n"
                           "  --seed N          seed of points, weights and order (1)\n"
                           "  --steps N         training steps: the next multiple of 4 above N (400)\n"
                           "  --kernels NAME    instruction set: auto, c, avx2, ... (c, with which the pictures in the "
                           "repository are made)\n" REPORT_HELP;

/* GRID cells per side of the picture; POINTS points in each of BLOBS clusters, labeled in turn. */
enum {
    GRID = 64,
    BLOBS = 7,
    POINTS = 32,
    N = BLOBS * POINTS,
    LABELS = 3,
    EXPERTS = 6,
    WIDTH = 12,
    HIDDEN = 16,
    BATCH = 56,
    NOBODY = EXPERTS,
    PATH = 1000
};
#define REACH 1.7 /* the picture shows -REACH .. REACH */

static const char *folder, *only;
static long seed = 1, steps = 400;
static int kernels = MOE_KERNELS_C;

static int fail(const char *what, const char *why) {
    fprintf(stderr, is_named(what, why) ? "gallery: %.0s%s\n" : "gallery: %s: %s\n", what, why);
    return 1;
}

/* Flushes the output; fails if it could not be written. */
static int finish(void) { return fflush(stdout) != 0 || ferror(stdout) ? fail("the output", "cannot be written") : 0; }

/* Whether the report is one of the files in the folder. */
static int is_report_among_pictures(void) {
    char path[PATH];
    sprintf(path, "%s/README.md", folder);
    if (only == NULL && is_same_file(path, report_path)) return 1;
    for (const moe_preset *p = moe_presets(); p->name != NULL; p++) {
        sprintf(path, "%s/%.60s.svg", folder, p->name);
        if (is_same_file(path, report_path)) return 1;
    }
    return 0;
}

static int read_options(int count, char **words) {
    while (--count > 0) {
        const char *word = *++words, *value = count > 1 ? words[1] : "";
        char *end = NULL;
        if (strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0) exit(fputs(help, stdout) < 0 || finish());
        if (*value == '\0') return fail(word, "no such option, or its value is missing; see -h");
        if (strcmp(word, "-o") == 0) folder = value;
        else if (strcmp(word, "--preset") == 0) only = value;
        else if (strcmp(word, "--report") == 0) report_path = value;
        else if (strcmp(word, "--seed") == 0) seed = strtol(value, &end, 10);
        else if (strcmp(word, "--steps") == 0) steps = strtol(value, &end, 10);
        else if (strcmp(word, "--kernels") != 0) return fail(word, "no such option; see -h");
        else
            for (kernels = 0; moe_kernels_name(kernels) != NULL && strcmp(moe_kernels_name(kernels), value) != 0;)
                kernels++;
        if ((end != NULL && (*end != '\0' || end == value)) || steps < 1 || steps > 100000 || seed < 0 ||
            seed > 999999999 || moe_kernels_name(kernels) == NULL) {
            fprintf(stderr, "gallery: %s %s: not a value of this option; see -h\n", word, value);
            return 1;
        }
        count--;
        words++;
    }
    if (folder == NULL) folder = example_file("gallery");
    if (strlen(folder) > PATH - 100) return fail("-o", "the folder's name is too long");
    if (only != NULL && moe_preset_find(only) == NULL)
        return fail(only, "there is no preset of this name; sh examples/run routers lists them");
    if (moe_kernels_select(kernels) == NULL)
        return fail("--kernels", "not compiled in, or this machine cannot run them");
    return is_report_among_pictures() ? fail(report_path, WRITTEN_TWICE) : 0;
}

/* ---- the same points for all ---- */

static moe_real x[N * 2];
static int32_t labels[N];

/* A cluster in the middle and six around it; neighbors have different labels. */
static void make_points(void) {
    moe_rng rng;
    moe_rng_seed(&rng, (uint64_t)seed + 1000);
    for (int t = 0; t < N; t++) {
        int blob = t % BLOBS;
        double angle = 6.283185307179586 * blob / (BLOBS - 1), radius = blob < BLOBS - 1 ? 1.05 : 0;
        x[2 * t] = (moe_real)(radius * cos(angle) + 0.2 * (double)moe_rng_normal(&rng));
        x[2 * t + 1] = (moe_real)(radius * sin(angle) + 0.2 * (double)moe_rng_normal(&rng));
        labels[t] = blob % LABELS;
    }
}

/* ---- one preset ---- */

/* A preset at the size of the picture: six experts, at most two per token. */
static moe_status configure(const char *name, moe_layer_config *c, moe_error *error) {
    moe_status status = moe_layer_preset(name, c, error);
    if (status != MOE_OK) return status;
    c->router.n_experts = EXPERTS;
    c->d_ff = HIDDEN;
    if (c->router.top_k > 2) c->router.top_k = 2;
    if (c->router.select == MOE_SELECT_GROUPED_EACH) c->router.groups = c->router.top_k;
    if (c->router.select == MOE_SELECT_GROUPED_TOP_K) {
        c->router.groups = 3;
        c->router.groups_kept = 2;
    }
    if (c->n_shared > 1) c->n_shared = 1;
    c->router.sample_at = MOE_SAMPLE_TRAINING; /* a picture of draws has no regions */
    if (c->router.n_zero > 2) c->router.n_zero = 2;
    if (c->router.n_copy > 2) c->router.n_copy = 2;
    if (c->router.bias_real > 1) c->router.bias_real = 1;
    if (c->router.nodes > 1) c->router.nodes = 2;
    c->router.student_dim = 0; /* points have no ids */
    if (c->router.freeze_at > 0) c->router.freeze_at = (int)(steps / 2) + 1;
    return MOE_OK;
}

/* A linear layer, the MoE layer, a linear output layer. Adaptive clustering takes its clusters from
   another MoE layer before it. */
static moe_status build(moe_net *net, const moe_layer_config *c, size_t *module, moe_error *error) {
    moe_layer_config before;
    moe_status status = configure("smoe", &before, error);
    if (status != MOE_OK) return status;
    moe_net_init(net, 2, kernels, NULL);
    moe_net_linear(net, WIDTH);
    if (c->router.input == MOE_INPUT_ADAPTIVE_CLUSTERING) {
        moe_net_mixture(net, &before);
        moe_net_residual(net, 1);
    }
    *module = net->n_modules;
    moe_net_mixture(net, c);
    moe_net_linear(net, LABELS);
    return moe_net_build(net, 1, (uint64_t)seed, error);
}

static moe_status train(moe_net *net, moe_error *error) {
    moe_train_config training = {0};
    moe_data data = {.n = N, .x = x, .labels = labels};
    training.epochs = (int)(steps * BATCH / N) + 1;
    training.batch = BATCH;
    training.seed = (uint64_t)seed;
    training.rate = (moe_real)0.01;
    training.final_rate = (moe_real)0.1;
    training.clip = 1;
    return moe_fit(net, &data, NULL, &training, error);
}

/* The token's first choice, before capacity; NOBODY: no expert. Soft routing has no choices: the
   largest weight. */
static unsigned char first_choice(const moe_routing *routing, size_t t) {
    const moe_real *weights = routing->weights + t * routing->n_experts;
    size_t best = 0;
    if (routing->plan.rows == 0)
        return (unsigned char)(routing->n_choices[t] > 0 ? routing->choices[t * routing->max_choices] : NOBODY);
    for (size_t e = 1; e < routing->n_experts; e++) best = weights[e] > weights[best] ? e : best;
    return (unsigned char)best;
}

/* Fills the grid row by row, each in one call with all points, so that routers that compare tokens
   see the data. */
static moe_status fill(const moe_net *net, size_t module, unsigned char *grid, moe_error *error) {
    static moe_real input[(N + GRID) * 2];
    moe_call call = {0};
    moe_net_pass pass;
    size_t bytes;
    moe_status status = moe_net_work_size(net, N + GRID, 0, &bytes);
    void *work = status == MOE_OK ? malloc(bytes) : NULL;
    call.n_tokens = N + GRID;
    call.x = input;
    memcpy(input + 2 * GRID, x, sizeof x);
    if (status == MOE_OK && work == NULL) status = MOE_ERR_MEMORY;
    for (size_t row = 0; row < GRID && status == MOE_OK; row++) {
        for (size_t i = 0; i < GRID; i++) {
            input[2 * i] = (moe_real)(REACH * (2 * ((double)i + 0.5) / GRID - 1));
            input[2 * i + 1] = (moe_real)(REACH * (1 - 2 * ((double)row + 0.5) / GRID));
        }
        if ((status = moe_net_forward(net, &call, work, bytes, &pass)) != MOE_OK) break;
        for (size_t i = 0; i < GRID; i++) grid[row * GRID + i] = first_choice(moe_net_routing(net, &pass, module), i);
    }
    if (status != MOE_OK) sprintf(error->message, "%s", moe_status_text(status));
    free(work);
    return status;
}

/* ---- the picture ---- */

typedef struct picture {
    const moe_preset *preset;
    unsigned char grid[GRID * GRID];
} picture;

static moe_status put(moe_stream *stream, const char *text) { return stream->write(stream->ctx, text, strlen(text)); }

/* Writes text escaped for XML, and for Markdown tables with | _ * escaped, too. */
static moe_status put_escaped(moe_stream *stream, const char *text, int markdown) {
    moe_status status = MOE_OK;
    for (; *text != '\0' && status == MOE_OK; text++) {
        if (*text == '&') status = put(stream, "&amp;");
        else if (*text == '<') status = put(stream, "&lt;");
        else if (*text == '>') status = put(stream, "&gt;");
        else {
            if (markdown && strchr("|_*`\\[]", *text) != NULL) status = put(stream, "\\");
            if (status == MOE_OK) status = stream->write(stream->ctx, text, 1);
        }
    }
    return status;
}

/* Whether cells from..end-1 of a row are a maximal run of one expert. */
static int is_run(const unsigned char *grid, int row, int from, int end, int expert) {
    const unsigned char *cells = grid + row * GRID;
    int i = from;
    while (i < end && cells[i] == expert) i++;
    return i == end && (from == 0 || cells[from - 1] != expert) && (end == GRID || cells[end] != expert);
}

/* Writes the cells of one expert as rectangles: runs that repeat in the rows below. */
static moe_status put_region(moe_stream *stream, const unsigned char *grid, int expert) {
    moe_status status = MOE_OK;
    char text[120];
    int any = 0;
    for (int row = 0; row < GRID; row++)
        for (int i = 0, end; i < GRID && status == MOE_OK; i = end) {
            int below = row + 1;
            for (end = i + 1; end < GRID && grid[row * GRID + end] == grid[row * GRID + i];) end++;
            if (grid[row * GRID + i] != expert || (row > 0 && is_run(grid, row - 1, i, end, expert))) continue;
            while (below < GRID && is_run(grid, below, i, end, expert)) below++;
            if (!any++) {
                sprintf(text, "<path class=\"e%d\" d=\"", expert);
                status = put(stream, text);
            }
            sprintf(text, "M%d %dh%dv%dH%dz", i, row, end - i, below - row, i);
            if (status == MOE_OK) status = put(stream, text);
        }
    return any && status == MOE_OK ? put(stream, "\"/>\n") : status;
}

/* Marks the cells connected to cell `at` and returns their number; *best becomes the one farthest
   from other cells. */
static int flood(const unsigned char *grid, unsigned char *seen, int at, int *best) {
    static int queue[GRID * GRID];
    int n = 0, deepest = -1;
    seen[at] = 1;
    queue[n++] = at;
    for (int k = 0; k < n; k++) {
        static const int step[4][2] = {{1, 0}, {-1, 0}, {0, 1}, {0, -1}};
        for (int i = 0; i < 4; i++) {
            int column = queue[k] % GRID + step[i][0], row = queue[k] / GRID + step[i][1];
            int to = row * GRID + column;
            if (column < 0 || column >= GRID || row < 0 || row >= GRID || seen[to] || grid[to] != grid[at]) continue;
            seen[to] = 1;
            queue[n++] = to;
        }
    }
    for (int k = 0; k < n; k++) {
        int depth = 0, column = queue[k] % GRID;
        int row = queue[k] / GRID, same = 1;
        while (same) {
            depth++;
            for (int r = row - depth; r <= row + depth && same; r++)
                for (int c = column - depth; c <= column + depth && same; c++)
                    same = r >= 0 && r < GRID && c >= 0 && c < GRID && grid[r * GRID + c] == grid[at];
        }
        if (depth > deepest) {
            deepest = depth;
            *best = queue[k];
        }
    }
    return n;
}

/* Writes the expert's number in each of its regions with enough room. */
static moe_status put_numbers(moe_stream *stream, const unsigned char *grid) {
    static unsigned char seen[GRID * GRID];
    moe_status status = put(stream, "<g class=\"n\">\n");
    memset(seen, 0, sizeof seen);
    for (int at = 0; at < GRID * GRID && status == MOE_OK; at++) {
        char text[80];
        int best = at;
        if (seen[at] || grid[at] == NOBODY || flood(grid, seen, at, &best) < GRID * GRID / 80) continue;
        sprintf(text, "<text x=\"%d.5\" y=\"%d\">%d</text>\n", best % GRID, best / GRID + 2, grid[at]);
        status = put(stream, text);
    }
    return status == MOE_OK ? put(stream, "</g>\n") : status;
}

/* Half of the points, by label: discs, squares, bars. */
static moe_status put_points(moe_stream *stream) {
    static const char *const shape[LABELS] = {"<path class=\"p\" stroke-linecap=\"round\" d=\"",
                                              "<path class=\"p\" stroke-linecap=\"square\" d=\"",
                                              "<path class=\"p bar\" d=\""};
    moe_status status = MOE_OK;
    char text[60];
    for (int label = 0; label < LABELS && status == MOE_OK; label++) {
        status = put(stream, shape[label]);
        for (int t = 0; t < N / 2 && status == MOE_OK; t++) {
            double column = GRID * (1 + (double)x[2 * t] / REACH) / 2;
            double row = GRID * (1 - (double)x[2 * t + 1] / REACH) / 2;
            if (labels[t] != label) continue;
            sprintf(text, label == LABELS - 1 ? "M%.1f %.1fv2" : "M%.1f %.1fh0", column,
                    label == LABELS - 1 ? row - 1 : row);
            status = put(stream, text);
        }
        if (status == MOE_OK) status = put(stream, "\"/>\n");
    }
    return status;
}

/* Shares of the plane, as a text description of the picture. */
static moe_status put_shares(moe_stream *stream, const unsigned char *grid) {
    moe_status status = MOE_OK;
    char text[60];
    for (int e = 0; e <= NOBODY && status == MOE_OK; e++) {
        int n = 0;
        for (int i = 0; i < GRID * GRID; i++) n += grid[i] == e;
        if (n == 0) continue;
        if (e == NOBODY) sprintf(text, "; no expert has %.0f %%", 100.0 * n / (GRID * GRID));
        else sprintf(text, "; expert %d has %.0f %%", e, 100.0 * n / (GRID * GRID));
        status = put(stream, text);
    }
    return status;
}

/* Colors that are distinguishable with the common kinds of color blindness (Okabe, Ito 2008, Color
   universal design). */
static moe_status write_svg(void *ctx, moe_stream *stream) {
    static const char begin[] = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 64 64\" width=\"256\" "
                                "height=\"256\" role=\"img\" aria-labelledby=\"t d\">\n<title id=\"t\">";
    static const char style[] =
        "</desc>\n<style>\n"
        ".b{fill:#fff}.e0{fill:#e69f00}.e1{fill:#56b4e9}.e2{fill:#009e73}.e3{fill:#f0e442}.e4{fill:#4a7fd0}.e5{fill:#"
        "cc79a7}\n"
        "path{fill-opacity:.62}.p{fill:none;stroke:#000;stroke-opacity:.5;stroke-width:1.1}.bar{stroke-width:.8}\n"
        ".n{font:bold 6px "
        "sans-serif;text-anchor:middle;fill:#000;stroke:#fff;stroke-width:1.4px;paint-order:stroke;stroke-linejoin:"
        "round}\n"
        "@media(prefers-color-scheme:dark){.b{fill:#0d1117}.p{stroke:#fff}.n{fill:#fff;stroke:#0d1117}}\n"
        "</style>\n<rect class=\"b\" width=\"64\" height=\"64\"/>\n<g shape-rendering=\"crispEdges\">\n";
    const picture *p = (const picture *)ctx;
    moe_status status = put(stream, begin);
    if (status == MOE_OK) status = put_escaped(stream, p->preset->name, 0);
    if (status == MOE_OK)
        status =
            put(stream, ": which expert is the first choice where</title>\n<desc id=\"d\">The plane of two inputs. ");
    if (status == MOE_OK) status = put_escaped(stream, p->preset->formula, 0);
    if (status == MOE_OK) status = put_shares(stream, p->grid);
    if (status == MOE_OK) status = put(stream, style);
    for (int e = 0; e < EXPERTS && status == MOE_OK; e++) status = put_region(stream, p->grid, e);
    if (status == MOE_OK) status = put(stream, "</g>\n");
    if (status == MOE_OK) status = put_points(stream);
    if (status == MOE_OK) status = put_numbers(stream, p->grid);
    return status == MOE_OK ? put(stream, "</svg>\n") : status;
}

/* The regions as a figure of the report. */
static void report_picture(const picture *p) {
    moe_figure *f = report_add(MOE_FIGURE_MAP, p->preset->name, GRID, GRID);
    int32_t *experts = (int32_t *)report_grab(GRID * GRID, sizeof *experts);
    for (size_t i = 0; i < GRID * GRID; i++) experts[i] = p->grid[i] == NOBODY ? -1 : p->grid[i];
    f->experts = experts;
    f->n_experts = EXPERTS;
    f->caption = p->preset->formula;
}

/* Trains and draws one preset; why receives the library's message if it cannot be drawn, else "".
   Returns 1 if memory is short or a file cannot be written. */
static int draw(const moe_preset *preset, char *why) {
    static picture p;
    char path[PATH];
    moe_layer_config c;
    moe_net net = {0};
    moe_error error = {0};
    size_t module = 0;
    moe_status status = configure(preset->name, &c, &error);
    *why = '\0';
    if (status == MOE_OK) status = build(&net, &c, &module, &error);
    if (status == MOE_OK) status = train(&net, &error);
    if (status == MOE_OK) status = fill(&net, module, p.grid, &error);
    moe_net_free(&net);
    sprintf(path, "%s/%.60s.svg", folder, preset->name);
    if (status == MOE_ERR_MEMORY) return fail(preset->name, error.message);
    if (status != MOE_OK) {
        strcpy(why, error.message);
        remove(path);
        return 0;
    }
    p.preset = preset;
    if (report_path != NULL) report_picture(&p);
    return moe_file_replace(path, write_svg, &p, &error) != MOE_OK ? fail(path, error.message) : 0;
}

/* ---- the page ---- */

enum { TOP_K, MANY, ASSIGNED, EXPERTS_SAY, CLUSTERS, REFINED, ALL, CHANCE, PUBLISHED, N_GROUPS };
static const struct {
    const char *title, *about;
} groups[N_GROUPS] = {
    {"The best k by a score",
     "Each token takes the k experts with the largest scores, which also determine the weights. Start\n"
     "here: causal and cheap, and dropless except for gshard and vmoe."},
    {"As many experts as a token needs",
     "The number of experts follows from the gate: tokens with a confident gate take few, others more."},
    {"Load balanced by the selection",
     "Experts choose tokens, or an assignment is computed for the batch. Even load without a balance loss;\n"
     "a token's result depends on the others in the call."},
    {"Scores from the experts themselves",
     "The score is an activation inside the experts, so all of them start on every token."},
    {"Adaptive clustering",
     "Features have more weight if the cluster of the token is tight. Needs a previous MoE layer; here one\n"
     "of smoe."},
    {"Refined by other tokens",
     "A token's gate is mixed with those of similar tokens, or of tokens that it attends to."},
    {"All experts",
     "Dense gates of small experts, and soft mixtures of tokens: there is no selection, so every step is\n"
     "differentiable. The picture shows the largest weight."},
    {"Random or fixed routing",
     "The router is not learned: a frozen random start, random draws, or a table of token ids. Baselines\n"
     "that are hard to beat by much."},
    {"As in published models",
     "The routing of models with public weights, with their own numbers of experts; the pictures have six."},
};

/* The group of a preset: those from mixtral on are of published models, the others are grouped by
   their distinguishing stage. */
static int group_of(const moe_preset *p) {
    moe_router_config c;
    if (p >= moe_preset_find("mixtral") || moe_router_preset(p->name, &c, NULL) != MOE_OK) return PUBLISHED;
    if (c.refine != MOE_REFINE_NONE) return REFINED;
    if (c.input == MOE_INPUT_ADAPTIVE_CLUSTERING) return CLUSTERS;
    if (moe_router_traits(&c) & MOE_TRAIT_NEEDS_ALL_EXPERTS) return EXPERTS_SAY;
    if (c.select == MOE_SELECT_DENSE || c.select == MOE_SELECT_SOFT) return ALL;
    if (c.select == MOE_SELECT_HASH || c.select == MOE_SELECT_SAMPLE || c.score == MOE_SCORE_RANDOM) return CHANCE;
    if (c.select == MOE_SELECT_TOP_P || c.select == MOE_SELECT_THRESHOLD || c.select == MOE_SELECT_POSITIVE)
        return MANY;
    return c.select == MOE_SELECT_EXPERT_CHOICE || c.select == MOE_SELECT_AFFINITY || c.select == MOE_SELECT_SINKHORN ||
                   c.select == MOE_SELECT_BALANCED || c.score == MOE_SCORE_GRAP
               ? ASSIGNED
               : TOP_K;
}

typedef struct page {
    const char *const *why; /* for each preset: why there is no picture */
} page;

static moe_status put_traits(moe_stream *stream, const moe_router_config *c) {
    moe_status status = MOE_OK;
    unsigned traits = moe_router_traits(c);
    int any = 0;
    for (unsigned bit = 1; moe_trait_name(bit) != NULL && status == MOE_OK; bit <<= 1) {
        if (!(traits & bit)) continue;
        status = put(stream, any ? ", " : "");
        if (status == MOE_OK) status = put_escaped(stream, moe_trait_name(bit), 1);
        any = 1;
    }
    return status;
}

/* One row: the picture and the preset's description. */
static moe_status put_preset(moe_stream *stream, const moe_preset *p, const char *why) {
    moe_layer_config c;
    moe_error error = {0};
    char text[300];
    moe_status status = moe_layer_preset(p->name, &c, &error), decodes;
    if (status != MOE_OK) return status;
    c.router.d_model = 512;
    if (c.router.select == MOE_SELECT_HASH || c.router.student_dim > 0) c.router.table_size = 32000;
    if (*why == '\0') {
        sprintf(text, "| <img src=\"%s.svg\" width=\"180\" alt=\"regions of %s\"> | ", p->name, p->name);
        status = put(stream, text);
    } else {
        status = put(stream, "| no picture: ");
        if (status == MOE_OK) status = put_escaped(stream, why, 1);
        if (status == MOE_OK) status = put(stream, " | ");
    }
    sprintf(text, "<a name=\"%s\"></a>**", p->name);
    if (status == MOE_OK) status = put(stream, text);
    if (status == MOE_OK) status = put_escaped(stream, p->name, 1);
    if (status == MOE_OK) status = put(stream, *p->aliases != '\0' ? "** (also " : "**");
    if (status == MOE_OK) status = put_escaped(stream, p->aliases, 1);
    if (status == MOE_OK) status = put(stream, *p->aliases != '\0' ? ")<br>" : "<br>");
    if (status == MOE_OK) status = put_escaped(stream, p->formula, 1);
    if (status == MOE_OK) status = put(stream, "<br>*traits:* ");
    if (status == MOE_OK) status = put_traits(stream, &c.router);
    decodes = moe_router_check_decoding(&c.router, &error);
    if (status == MOE_OK) status = put(stream, decodes == MOE_OK ? "<br>*decodes:* yes" : "<br>*decodes:* no; ");
    if (status == MOE_OK && decodes != MOE_OK) status = put_escaped(stream, error.message, 1);
    if (status == MOE_OK) status = put(stream, "<br>*set by:* `");
    if (status == MOE_OK) status = put(stream, p->router);
    if (status == MOE_OK && *p->layer != '\0') {
        status = put(stream, " ");
        status = status == MOE_OK ? put(stream, p->layer) : status;
    }
    if (status == MOE_OK) status = put(stream, "`<br>*source:* ");
    if (status == MOE_OK) status = put_escaped(stream, p->source, 1);
    return status == MOE_OK ? put(stream, " |\n") : status;
}

static moe_status put_group(moe_stream *stream, const page *of, int group) {
    const moe_preset *p;
    moe_status status = put(stream, "\n## ");
    if (status == MOE_OK) status = put(stream, groups[group].title);
    if (status == MOE_OK) status = put(stream, "\n\n");
    if (status == MOE_OK) status = put(stream, groups[group].about);
    if (status == MOE_OK) status = put(stream, "\n\n| first choices | preset |\n|:-:|---|\n");
    for (p = moe_presets(); p->name != NULL && status == MOE_OK; p++)
        if (group_of(p) == group) status = put_preset(stream, p, of->why[p - moe_presets()]);
    return status;
}

/* Names with links, group by group. */
static moe_status put_contents(moe_stream *stream) {
    moe_status status = put(stream, "| kind | presets |\n|---|---|\n");
    for (int group = 0; group < N_GROUPS && status == MOE_OK; group++) {
        const char *gap = "";
        status = put(stream, "| ");
        if (status == MOE_OK) status = put(stream, groups[group].title);
        if (status == MOE_OK) status = put(stream, " | ");
        for (const moe_preset *p = moe_presets(); p->name != NULL && status == MOE_OK; p++) {
            char text[200];
            if (group_of(p) != group) continue;
            sprintf(text, "%s[%.60s](#%.60s)", gap, p->name, p->name);
            gap = ", ";
            status = put(stream, text);
        }
        if (status == MOE_OK) status = put(stream, " |\n");
    }
    return status;
}

static moe_status write_page(void *ctx, moe_stream *stream) {
    static const char begin[] =
        "# The routers, one by one\n\n"
        "Generated by `sh examples/run gallery` from the library's table of presets. Every preset was trained\n"
        "on the same 224 points of a plane (seven clusters, three labels: discs, squares, bars), in the same\n"
        "network: a linear layer from 2 to 12 features, an MoE layer with six experts, at most two per point,\n"
        "and a linear output layer. Color and number show a point's first choice; where no expert is chosen\n"
        "the background shows. Each row of a picture is routed in one call with the training points, so that\n"
        "routers that compare tokens see them. A picture shows one seed, not the variety of possible borders;\n"
        "presets that differ only in weights, losses or the number of experts look alike here.\n\n"
        "`moe_layer_preset(NAME, &config, &error)` applies the settings under *set by*; every field can be\n"
        "changed afterwards. `sh examples/run routers NAME` explains a preset stage by stage; with `--show`\n"
        "it follows a token through it.\n\n"
        "Traits: *causal*, later tokens do not change a token's result; *needs\\_batch*, other tokens of the\n"
        "call do; *needs\\_token\\_ids*, *needs\\_attention*, *needs\\_previous\\_layer*, data that the caller or\n"
        "the network must supply; *needs\\_all\\_experts*, all experts start on every token; *stochastic*,\n"
        "draws random numbers in training; *stateful*, has state that changes between steps and is saved with\n"
        "the model.\n\n";
    const page *of = (const page *)ctx;
    moe_status status = put(stream, begin);
    if (status == MOE_OK) status = put_contents(stream);
    for (int group = 0; group < N_GROUPS && status == MOE_OK; group++) status = put_group(stream, of, group);
    return status;
}

int main(int count, char **words) {
    enum { MOST = 500 };
    static char why[MOST][sizeof(((moe_error *)0)->message)];
    static const char *whys[MOST];
    const moe_preset *p;
    page of = {whys};
    moe_error error = {0};
    char path[PATH];
    int drawn = 0, n = 0, wrong;
    if (read_options(count, words)) return EXIT_USAGE;
    if ((wrong = report_checked("gallery")) != 0) return wrong;
    make_points();
    for (p = moe_presets(); p->name != NULL && n < MOST; p++, n++) {
        whys[n] = why[n];
        if (only != NULL && moe_preset_find(only) != p) continue;
        if (draw(p, why[n])) return 1;
        drawn += *why[n] == '\0';
        printf("%-24s %s\n", p->name, *why[n] == '\0' ? "drawn" : why[n]);
        fflush(stdout);
    }
    sprintf(path, "%s/README.md", folder);
    if (only == NULL && moe_file_replace(path, write_page, &of, &error)) return fail(path, error.message);
    printf("%d of %d presets drawn into %s%s\n", drawn, only != NULL ? 1 : n, folder,
           only != NULL ? "" : ", with README.md");
    return report_write_added("gallery", "How each router splits the same plane") || finish();
}
