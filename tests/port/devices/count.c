/* A plug-in for QEMU's emulators that counts the instructions between two addresses. Debian's QEMU
   takes plug-ins but has no header for them, so what is used of it is declared here.
     gcc -O2 -shared -fPIC count.c -o count.so
     qemu-system-arm ... -plugin ./count.so,from=ADDRESS,to=ADDRESS[,cycles=TABLE] -d plugin
   At the end it says "count runs N sum N worst N": how often it came from `from` (which counts) to
   `to` (which does not), the instructions of all these ways and of the longest; with a table of
   cycles (cortex_m4.txt says what it holds) also "cycles N", the sum of theirs. With each=on every
   way has a line "run N" before. */

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;   /* a block of instructions that is translated as a whole */
struct qemu_plugin_insn;

void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id,
                                           void (*translated)(qemu_plugin_id_t, struct qemu_plugin_tb *));
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *block);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *block, size_t i);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *instruction);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *instruction);
char *qemu_plugin_insn_disas(const struct qemu_plugin_insn *instruction);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *instruction, void (*executed)(unsigned, void *),
                                            int flags, void *data);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*ended)(qemu_plugin_id_t, void *), void *data);
void qemu_plugin_outs(const char *text);

#define PUBLIC __attribute__((visibility("default")))

PUBLIC int qemu_plugin_version = 1;
PUBLIC int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv);

static uint64_t from, to;
static uint64_t total, start, runs, sum, worst;
static uint64_t spent, spent_before, cycles; /* up to here, before this run, of all runs */
static bool inside, tells;

/* ---- the table of cycles ---- */

enum { ROWS = 200, NAME = 24 };

typedef struct row {
    char name[NAME]; /* of an instruction, or with * behind it the beginning of names */
    unsigned cycles, each; /* each: for every register of the list */
} row;

static row table[ROWS];
static size_t rows;
static unsigned refill; /* of a branch that is taken */

static int read_table(const char *path) {
    char line[200], name[NAME];
    unsigned base, each;
    FILE *f = fopen(path, "r");
    if (f == NULL) return 0;
    while (fgets(line, sizeof line, f) != NULL && rows < ROWS) {
        if (line[0] == '#' || sscanf(line, "%23s %u %u", name, &base, &each) != 3) continue;
        if (strcmp(name, "refill") == 0) refill = base;
        else {
            strcpy(table[rows].name, name);
            table[rows].cycles = base;
            table[rows++].each = each;
        }
    }
    fclose(f);
    return rows > 0;
}

/* An instruction, its cycles, and where the next one lies if it is no branch that is taken. */
typedef struct place {
    unsigned cycles;
    uint64_t at, next;
} place;

/* Registers of a list "{r0, r4-r7}". */
static unsigned registers(const char *text) {
    const char *at = strchr(text, '{');
    unsigned n = 0;
    int first, last;
    for (; at != NULL && *at != '}' && *at != '\0'; at++) {
        if (*at != '{' && *at != ',') continue;
        n++;
        if (sscanf(at + 1, " %*[a-z]%d-%*[a-z]%d", &first, &last) == 2) n += (unsigned)(last - first);
    }
    return n;
}

/* The row of the table: the first that fits. An instruction that no row names is an error of the
   table, which the sum shows. */
static unsigned cycles_of(const char *text) {
    size_t i, n;
    for (i = 0; i < rows; i++) {
        n = strlen(table[i].name);
        if (table[i].name[n - 1] == '*' ? strncmp(text, table[i].name, n - 1) == 0
                                        : strncmp(text, table[i].name, n) == 0 && strchr(" \t.", text[n]) != NULL)
            return table[i].cycles + table[i].each * registers(text);
    }
    fprintf(stderr, "no cycles for: %s\n", text);
    return 1000000;
}

static place *place_of(const struct qemu_plugin_insn *instruction) {
    char *text = qemu_plugin_insn_disas(instruction);
    place *p = malloc(sizeof *p);
    if (p == NULL) abort();
    p->cycles = cycles_of(text);
    p->at = qemu_plugin_insn_vaddr(instruction);
    p->next = p->at + qemu_plugin_insn_size(instruction);
    free(text);
    return p;
}

/* ---- counting ---- */

static uint64_t expected; /* where the instruction behind the last one lies */

static void count(unsigned cpu, void *data) {
    (void)cpu;
    (void)data;
    total++;
}

static void arrive(unsigned cpu, void *data) {
    const place *p = data;
    (void)cpu;
    total++;
    if (p->at != expected) spent += refill;
    spent += p->cycles;
    expected = p->next;
}

static void enter(unsigned cpu, void *data) {
    (void)cpu;
    (void)data;
    inside = true;
    start = total;
    spent_before = spent;
}

static void leave(unsigned cpu, void *data) {
    uint64_t taken = total - start;
    char text[40];
    (void)cpu;
    (void)data;
    if (!inside) return;
    inside = false;
    snprintf(text, sizeof text, "run %" PRIu64 "\n", taken);
    if (tells) qemu_plugin_outs(text);
    runs++;
    sum += taken;
    cycles += spent - spent_before;
    if (taken > worst) worst = taken;
}

static void translate(qemu_plugin_id_t id, struct qemu_plugin_tb *block) {
    size_t i, n = qemu_plugin_tb_n_insns(block);
    (void)id;
    for (i = 0; i < n; i++) {
        struct qemu_plugin_insn *instruction = qemu_plugin_tb_get_insn(block, i);
        uint64_t address = qemu_plugin_insn_vaddr(instruction);
        if (address == from) qemu_plugin_register_vcpu_insn_exec_cb(instruction, enter, 0, NULL);
        if (address == to) qemu_plugin_register_vcpu_insn_exec_cb(instruction, leave, 0, NULL);
        if (rows == 0) qemu_plugin_register_vcpu_insn_exec_cb(instruction, count, 0, NULL);
        else qemu_plugin_register_vcpu_insn_exec_cb(instruction, arrive, 0, place_of(instruction));
    }
}

static void say(qemu_plugin_id_t id, void *data) {
    char text[120];
    (void)id;
    (void)data;
    snprintf(text, sizeof text, "count runs %" PRIu64 " sum %" PRIu64 " worst %" PRIu64, runs, sum, worst);
    qemu_plugin_outs(text);
    snprintf(text, sizeof text, " cycles %" PRIu64, cycles);
    if (rows > 0) qemu_plugin_outs(text);
    qemu_plugin_outs("\n");
}

int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv) {
    int i;
    (void)info;
    for (i = 0; i < argc; i++) {
        /* The last bit of an Arm function's address says that its code is Thumb. */
        if (strncmp(argv[i], "from=", 5) == 0) from = strtoull(argv[i] + 5, NULL, 0) & ~(uint64_t)1;
        if (strncmp(argv[i], "cycles=", 7) == 0 && !read_table(argv[i] + 7)) return 1;
        if (strncmp(argv[i], "each=", 5) == 0) tells = true;
        if (strncmp(argv[i], "to=", 3) == 0) to = strtoull(argv[i] + 3, NULL, 0) & ~(uint64_t)1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, translate);
    qemu_plugin_register_atexit_cb(id, say, NULL);
    return 0;
}
