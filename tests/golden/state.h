/* state.h - worked examples of the rules of state, for golden.c: a JSON list of {name, rule,
   config, start, steps}. Each step says what the optimizer's step observed (inputs) and the state
   after it; every router begins at start and lives through all steps. README.md describes the
   files. */

/* ---- JSON: objects, arrays, strings without escapes, numbers ---- */

typedef struct value {
    char kind;                 /* { [ " or 0, as the first character; 0: a number */
    const char *name, *text;   /* in an object; of a string */
    size_t name_length, length;
    double number;
    struct value *first, *next; /* of an object or array; beside it */
} value;

/* Reads one value at *at; NULL: not one. depth: how many arrays and objects are around it. */
static value *json_value(golden *g, const char **at, int depth);

static const char *json_blank(const char *at) { return at + strspn(at, " \t\r\n"); }

static int json_string(const char **at, const char **text, size_t *length) {
    const char *end;
    if (**at != '"') return 0;
    end = strchr(*at + 1, '"');
    if (end == NULL) return 0;
    *text = *at + 1;
    *length = (size_t)(end - *text);
    *at = end + 1;
    return memchr(*text, '\\', *length) == NULL;
}

/* The members of an object or array behind its opening bracket. */
static int json_members(golden *g, const char **at, value *v, int depth) {
    const char close = v->kind == '{' ? '}' : ']';
    value **last = &v->first;
    *at = json_blank(*at);
    if (**at == close) return ++*at != NULL;
    for (;;) {
        const char *name = "";
        size_t length = 0;
        *at = json_blank(*at);
        if (v->kind == '{' && (!json_string(at, &name, &length) || *(*at = json_blank(*at)) != ':')) return 0;
        if (v->kind == '{') ++*at;
        *last = json_value(g, at, depth + 1);
        if (*last == NULL) return 0;
        (*last)->name = name;
        (*last)->name_length = length;
        last = &(*last)->next;
        *at = json_blank(*at);
        if (**at == close) return ++*at != NULL;
        if (*(*at)++ != ',') return 0;
    }
}

static value *json_value(golden *g, const char **at, int depth) {
    value *v = (value *)grab(g, 1, sizeof *v);
    char *end;
    *at = json_blank(*at);
    if (depth > 16) return NULL;
    if (**at == '{' || **at == '[' || **at == '"') v->kind = **at;
    if (v->kind == '"') return json_string(at, &v->text, &v->length) ? v : NULL;
    if (v->kind != 0) return ++*at != NULL && json_members(g, at, v, depth) ? v : NULL;
    v->text = *at;
    v->number = strtod(*at, &end);
    v->length = (size_t)(end - *at);
    *at = end;
    return v->length > 0 ? v : NULL;
}

/* The member of a name; a failure of the case if there is none. */
static const value *member(golden *g, const value *v, const char *name) {
    for (v = v->first; v != NULL; v = v->next)
        if (v->name_length == strlen(name) && memcmp(v->name, name, v->name_length) == 0) return v;
    fail(g, "the example lacks", name);
    return NULL;
}

static int has_member(const value *v, const char *name) {
    for (v = v->first; v != NULL; v = v->next)
        if (v->name_length == strlen(name) && memcmp(v->name, name, v->name_length) == 0) return 1;
    return 0;
}

static size_t members(const value *v) {
    size_t n = 0;
    for (v = v->first; v != NULL; v = v->next) n++;
    return n;
}

static double member_number(golden *g, const value *v, const char *name) {
    v = member(g, v, name);
    return v != NULL ? v->number : 0.0;
}

/* ---- a router and its state ---- */

typedef struct worked {
    golden *g;
    moe_router router;
    moe_real *tensors[MOE_ROUTER_PARAMETER_COUNT];
    moe_routing routing; /* of the last call */
    int step;
} worked;

/* Compares n numbers, to 1e-12 (float: 1e-5) of the largest. */
static void want_numbers(worked *w, const char *what, const moe_real *got, const value *want) {
    const double bound = MOE_REAL_IS_DOUBLE ? 1e-12 : 1e-5;
    double largest = 0.0, difference = 0.0;
    const value *v;
    size_t i = 0;
    char text[NAME_ROOM];
    if (want == NULL) return;
    for (v = want->first; v != NULL; v = v->next) largest = fmax(largest, fabs(v->number));
    for (v = want->first; v != NULL; v = v->next, i++)
        difference = moe_is_finite(got[i]) ? fmax(difference, fabs((double)got[i] - v->number)) : HUGE_VAL;
    if (verbose) printf("    step %d %s %.1e of %.1e\n", w->step, what, difference, largest);
    sprintf(text, "%.60s, step %d", what, w->step);
    if (i == 0 || difference > bound * largest) fail(w->g, "another state", text);
    if (largest > 0.0 && !(difference / largest < w->g->worst)) {
        w->g->worst = difference / largest;
        sprintf(w->g->worst_name, "%.60s", what);
    }
}

static void want_number(worked *w, const char *what, double got, const value *v, const char *name) {
    const value *want = member(w->g, v, name);
    char text[NAME_ROOM];
    sprintf(text, "%.40s, step %d: %.9g", what, w->step, got);
    if (want != NULL && (got < want->number || got > want->number)) fail(w->g, "another number", text);
}

/* The state tensors of a step's "after". */
static void want_state(worked *w, const value *step) {
    const value *after = member(w->g, step, "after"), *v;
    char name[NAME_ROOM];
    moe_parameter p;
    int i;
    for (v = after != NULL ? after->first : NULL; v != NULL; v = v->next) {
        const moe_real *found = NULL;
        sprintf(name, "%.*s", (int)v->name_length, v->name);
        for (i = 0; i < MOE_ROUTER_PARAMETER_COUNT; i++)
            if (moe_router_parameter(&w->router.config, i, &p) == MOE_OK && strcmp(p.name, name) == 0 &&
                p.count == members(v))
                found = w->tensors[i];
        if (found == NULL) fail(w->g, "the router has no such state", name);
        else want_numbers(w, name, found, v);
    }
}

/* Sets what an example's config says; other settings come before it. */
static int worked_config(golden *g, moe_layer_config *c, const char *settings, const value *config) {
    char name[NAME_ROOM], text[VALUE_ROOM];
    moe_error error;
    const value *v;
    if (moe_fields_apply(moe_layer_fields(), c, settings, &error) != MOE_OK) return fail(g, settings, error.message);
    for (v = config->first; v != NULL; v = v->next) {
        sprintf(name, "%.*s", (int)v->name_length, v->name);
        sprintf(text, "%.*s", (int)v->length, v->text);
        if (strcmp(name, "layers") == 0) continue; /* how many the network has */
        if (moe_field_set(moe_layer_fields(), c, name, text, &error) != MOE_OK)
            return fail(g, "configuration", error.message);
    }
    return 1;
}

/* A router at the start of an example, its state at start, other tensors 0. */
static int worked_begin(worked *w, golden *g, const value *example, const char *settings) {
    const value *config = member(g, example, "config"), *start = member(g, example, "start"), *v, *n;
    moe_layer_config c;
    moe_parameter p;
    moe_error error;
    int i;
    memset(w, 0, sizeof *w);
    memset(&c, 0, sizeof c);
    w->g = g;
    if (config == NULL || start == NULL || !worked_config(g, &c, settings, config)) return 0;
    if (c.router.d_model == 0) c.router.d_model = c.router.n_experts;
    if (moe_router_init(&w->router, &c.router, NULL, &error) != MOE_OK) return fail(g, "configuration", error.message);
    for (i = 0; i < MOE_ROUTER_PARAMETER_COUNT; i++) {
        size_t at = 0;
        if (moe_router_parameter(&w->router.config, i, &p) != MOE_OK) continue;
        w->router.tensors[i] = w->tensors[i] = grab_reals(g, p.count);
        for (v = start->first; v != NULL; v = v->next)
            if (v->name_length == strlen(p.name) && memcmp(v->name, p.name, v->name_length) == 0)
                for (n = v->first; n != NULL && at < p.count; n = n->next) w->tensors[i][at++] = (moe_real)n->number;
    }
    return 1;
}

/* One call; x [n,d_model]. given may be NULL. */
static int worked_route(worked *w, size_t n, const moe_real *x, const int32_t *given, int training) {
    moe_call call;
    moe_error error;
    size_t bytes;
    void *work;
    memset(&call, 0, sizeof call);
    error.message[0] = '\0';
    call.n_tokens = n;
    call.x = x;
    call.given = given;
    call.training = training;
    call.error = &error;
    if (moe_route_size(&w->router, n, training, &bytes) != MOE_OK) return fail(w->g, "moe_route_size", "");
    work = grab(w->g, bytes, 1);
    if (moe_route(&w->router, &call, work, bytes, &w->routing) != MOE_OK)
        return fail(w->g, "moe_route", error.message);
    if (training && moe_router_observe(&w->router, &call, &w->routing, w->tensors) != MOE_OK)
        return fail(w->g, "moe_router_observe", "");
    return 1;
}

static int worked_advance(worked *w) {
    return moe_router_advance(&w->router, w->tensors) == MOE_OK || fail(w->g, "moe_router_advance", "");
}

/* ---- the rules ---- */

/* Forced routing gives each expert as many tokens as the example counts. */
static void run_bias_rule(worked *w, const value *step) {
    const value *seen = member(w->g, step, "inputs"), *loads, *v;
    const size_t d = (size_t)w->router.config.d_model, k = (size_t)w->router.config.top_k;
    size_t n = 0, t = 0, i;
    int32_t *given, e = 0;
    loads = seen != NULL ? member(w->g, seen, "counts") : NULL;
    if (loads == NULL) return;
    for (v = loads->first; v != NULL; v = v->next) n += (size_t)v->number;
    given = (int32_t *)grab(w->g, (n + 1) * k, sizeof *given);
    for (i = 0; i < (n + 1) * k; i++) given[i] = -1;
    for (v = loads->first; v != NULL; v = v->next, e++)
        for (i = 0; i < (size_t)v->number; i++) given[t++ * k] = e;
    /* the last token takes no expert */
    if (worked_route(w, n + 1, grab_reals(w->g, (n + 1) * d), given, 1) && worked_advance(w)) want_state(w, step);
}

/* The router's weight is the identity, so that x are the logits. */
static moe_real *logits_of(worked *w, const value *rows, size_t *n) {
    const size_t experts = (size_t)w->router.config.n_experts;
    moe_real *x;
    const value *row, *v;
    size_t e, i = 0;
    *n = members(rows);
    x = grab_reals(w->g, *n * experts);
    for (e = 0; e < experts; e++) w->tensors[MOE_ROUTER_WEIGHT][e * experts + e] = 1;
    for (row = rows->first; row != NULL; row = row->next)
        for (v = row->first; v != NULL && i < *n * experts; v = v->next) x[i++] = (moe_real)v->number;
    return x;
}

/* Logits just below and at the effective cutoffs. */
static void check_cutoffs(worked *w, const value *wanted) {
    const size_t experts = (size_t)w->router.config.n_experts;
    const double near = MOE_REAL_IS_DOUBLE ? 1e-12 : 1e-5;
    moe_real *x = grab_reals(w->g, 2 * experts);
    const value *v;
    size_t e = 0;
    for (v = wanted->first; v != NULL && e < experts; v = v->next, e++) {
        x[e] = (moe_real)(v->number - near * fabs(v->number));
        x[experts + e] = (moe_real)(v->number + near * fabs(v->number));
    }
    if (!worked_route(w, 2, x, NULL, 0)) return;
    for (e = 0; e < experts; e++)
        if (w->routing.selected[e] || !w->routing.selected[experts + e]) fail(w->g, "another effective cutoff", "");
}

static void check_selected(worked *w, const value *then) {
    const value *rows = member(w->g, then, "logits"), *wanted = member(w->g, then, "selected"), *row, *v;
    size_t n, i = 0;
    moe_real *x;
    if (rows == NULL || wanted == NULL) return;
    x = logits_of(w, rows, &n);
    if (!worked_route(w, n, x, NULL, 0)) return;
    for (row = wanted->first; row != NULL; row = row->next)
        for (v = row->first; v != NULL; v = v->next, i++)
            if (i < n * w->routing.n_experts && (w->routing.selected[i] != 0) != (v->number > 0.5))
                fail(w->g, "another selection", "then");
    if (i != n * w->routing.n_experts) fail(w->g, "another size", "then.selected");
}

static void run_expert_threshold(worked *w, const value *step) {
    const value *seen = member(w->g, step, "inputs"), *calls, *call;
    const size_t experts = (size_t)w->router.config.n_experts;
    calls = seen != NULL ? member(w->g, seen, "calls") : NULL;
    for (call = calls != NULL ? calls->first : NULL; call != NULL; call = call->next) {
        const value *rows = member(w->g, call, "logits");
        moe_real *before = grab_reals(w->g, experts), *x;
        size_t n, e;
        if (rows == NULL) return;
        memcpy(before, w->tensors[MOE_ROUTER_CUTOFF_SUM], experts * sizeof *before);
        x = logits_of(w, rows, &n);
        if (!worked_route(w, n, x, NULL, 1)) return;
        for (e = 0; e < experts; e++) before[e] = w->tensors[MOE_ROUTER_CUTOFF_SUM][e] - before[e];
        want_numbers(w, "quantile", before, member(w->g, call, "quantile"));
    }
    if (!worked_advance(w)) return;
    want_state(w, step);
    if (member(w->g, step, "effective_cutoff") != NULL) check_cutoffs(w, member(w->g, step, "effective_cutoff"));
    if (has_member(step, "then")) check_selected(w, member(w->g, step, "then"));
}

/* Every token and every gating vector have the same cosine, delta. */
static void run_capacity(worked *w, const value *step) {
    const value *seen = member(w->g, step, "inputs");
    const size_t experts = (size_t)w->router.config.n_experts, d = (size_t)w->router.config.d_model;
    size_t n, t, e;
    double delta;
    moe_real *x;
    if (seen == NULL) return;
    n = (size_t)member_number(w->g, seen, "tokens");
    delta = member_number(w->g, seen, "delta");
    x = grab_reals(w->g, n * d);
    for (e = 0; e < experts; e++) w->tensors[MOE_ROUTER_WEIGHT][e * d] = 1;
    for (t = 0; t < n; t++) {
        x[t * d] = (moe_real)delta;
        x[t * d + 1] = (moe_real)sqrt(1.0 - delta * delta);
    }
    if (!worked_route(w, n, x, NULL, 1) || !worked_advance(w)) return;
    want_state(w, step);
    want_number(w, "C", (double)w->routing.capacity, step, "C");
}

static void run_k_schedule(worked *w, const value *step) {
    const value *seen = member(w->g, step, "inputs");
    moe_real *x = grab_reals(w->g, (size_t)w->router.config.d_model);
    if (seen == NULL) return;
    w->tensors[MOE_ROUTER_STEP][0] = (moe_real)member_number(w->g, seen, "step");
    if (worked_route(w, 1, x, NULL, 1)) want_number(w, "K", (double)w->routing.top_k, step, "K");
}

typedef struct state_rule {
    const char *name, *settings; /* settings before those of the example */
    void (*run)(worked *w, const value *step);
} state_rule;

static const state_rule state_rules[] = {
    {"bias_rule", "selection_bias=1", run_bias_rule},
    {"select expert_threshold", "select=expert_threshold", run_expert_threshold},
    {"capacity_bound every", "", run_capacity},
    {"k_schedule", "", run_k_schedule}};

/* remoe: the layers of a network, whose loads are set. */
static void run_l1(golden *g, const value *example) {
    const value *config = member(g, example, "config"), *steps = member(g, example, "steps"), *step, *v;
    const size_t layers = config != NULL ? (size_t)member_number(g, config, "layers") : 0;
    moe_layer_config c;
    moe_error error;
    moe_net net;
    worked w;
    size_t i;
    int good = 1;
    memset(&c, 0, sizeof c);
    memset(&w, 0, sizeof w);
    w.g = g;
    if (layers == 0 || layers > 8) fail(g, "layers must be 1 to 8", "");
    if (g->outcome != PASSED || !worked_config(g, &c, "gate=relu select=positive weight=raw d_ff=2", config)) return;
    error.message[0] = '\0';
    moe_net_init(&net, 2, MOE_KERNELS_AUTO, NULL);
    for (i = 0; i < layers; i++) good &= moe_net_mixture(&net, &c) == MOE_OK;
    if (!good || moe_net_build(&net, 1, 1, &error) != MOE_OK) fail(g, "moe_net_build", error.message);
    for (step = steps->first; step != NULL && g->outcome == PASSED; step = step->next, w.step++) {
        const value *seen = member(g, step, "inputs"), *after = member(g, step, "after"), *pairs;
        moe_real got[8];
        moe_tensor load, l1;
        pairs = seen != NULL ? member(g, seen, "pairs_of_layers") : NULL;
        if (pairs == NULL || after == NULL) break;
        if (members(pairs) != layers) {
            fail(g, "pairs_of_layers has another number of layers", "");
            break;
        }
        for (i = 0, v = pairs->first; v != NULL; v = v->next, i++) {
            if (moe_layer_find(&net.modules[i].layer, "router.load", &load) != MOE_OK) break;
            load.data[0] = (moe_real)v->number;
            load.data[load.count - 1] = (moe_real)member_number(g, seen, "tokens");
        }
        if (v != NULL || moe_net_advance(&net) != MOE_OK) fail(g, "moe_net_advance", "");
        for (i = 0; i < layers; i++)
            if (moe_layer_find(&net.modules[i].layer, "router.l1", &l1) == MOE_OK) got[i] = l1.data[0];
            else fail(g, "the router has no such state", "router.l1");
        for (i = 1; i < layers && has_member(after, "net.l1"); i++)
            if (!same(got, got + i, 1)) fail(g, "layers differ in", "net.l1");
        want_numbers(&w, "l1", got, member(g, after, has_member(after, "net.l1") ? "net.l1" : "router.l1"));
    }
    moe_net_free(&net);
}

static void run_example(golden *g, const value *example) {
    const value *of = member(g, example, "rule"), *steps = member(g, example, "steps"), *step;
    const state_rule *r = NULL;
    worked w;
    size_t i;
    char text[VALUE_ROOM];
    if (of == NULL || steps == NULL) return;
    if (steps->first == NULL) fail(g, "no steps", "");
    sprintf(text, "%.*s", (int)(of->length < VALUE_ROOM ? of->length : VALUE_ROOM - 1), of->text);
    if (strcmp(text, "l1_controller") == 0) {
        run_l1(g, example);
        return;
    }
    for (i = 0; i < sizeof state_rules / sizeof state_rules[0]; i++)
        if (strcmp(state_rules[i].name, text) == 0) r = &state_rules[i];
    if (r == NULL) fail(g, "no such rule", text);
    if (r == NULL || !worked_begin(&w, g, example, r->settings)) return;
    for (step = steps->first; step != NULL && g->outcome == PASSED; step = step->next, w.step++) r->run(&w, step);
}

/* All examples of a file: verdicts[verdict] counts them. */
static void run_examples(const char *path, int *verdicts) {
    golden file;
    value *list = NULL;
    const value *example;
    const char *at;
    memset(&file, 0, sizeof file);
    if (moe_file_read(path, &file.bytes, NULL) == MOE_OK && file.bytes.size > 0) {
        char *text = (char *)grab(&file, file.bytes.size + 1, 1);
        memcpy(text, file.bytes.data, file.bytes.size);
        at = text;
        list = json_value(&file, &at, 0);
        if (*json_blank(at) != '\0') list = NULL;
    }
    if (list == NULL || list->kind != '[' || list->first == NULL) {
        printf("%s: no list of examples\n", path);
        verdicts[FAILED]++;
    }
    for (example = list != NULL && list->kind == '[' ? list->first : NULL; example != NULL; example = example->next) {
        golden g;
        const value *name;
        memset(&g, 0, sizeof g);
        name = member(&g, example, "name");
        run_example(&g, example);
        printf("%-36.*s %-8s", name != NULL ? (int)name->length : 0, name != NULL ? name->text : "",
               verdict_names[g.outcome]);
        printf(" %.1e %s %s\n", g.worst, g.worst_name, g.text);
        verdicts[g.outcome]++;
        end_case(&g);
    }
    end_case(&file);
}
