/* A plug-in for QEMU's emulators that counts the instructions between two addresses. Debian's QEMU
   takes plug-ins but has no header for them, so what is used of it is declared here.
     gcc -O2 -shared -fPIC count.c -o count.so
     qemu-system-arm ... -plugin ./count.so,from=ADDRESS,to=ADDRESS -d plugin
   At the end it says "count runs N sum N worst N": how often it came from `from` (which counts) to
   `to` (which does not), the instructions of all these ways and of the longest. */

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
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *instruction, void (*executed)(unsigned, void *),
                                            int flags, void *data);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*ended)(qemu_plugin_id_t, void *), void *data);
void qemu_plugin_outs(const char *text);

#define PUBLIC __attribute__((visibility("default")))

PUBLIC int qemu_plugin_version = 1;
PUBLIC int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv);

static uint64_t from, to;
static uint64_t total, start, runs, sum, worst;
static bool inside;

static void count(unsigned cpu, void *data) {
    (void)cpu;
    (void)data;
    total++;
}

static void enter(unsigned cpu, void *data) {
    (void)cpu;
    (void)data;
    inside = true;
    start = total;
}

static void leave(unsigned cpu, void *data) {
    uint64_t taken = total - start;
    (void)cpu;
    (void)data;
    if (!inside) return;
    inside = false;
    runs++;
    sum += taken;
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
        qemu_plugin_register_vcpu_insn_exec_cb(instruction, count, 0, NULL);
    }
}

static void say(qemu_plugin_id_t id, void *data) {
    char text[120];
    (void)id;
    (void)data;
    snprintf(text, sizeof text, "count runs %" PRIu64 " sum %" PRIu64 " worst %" PRIu64 "\n", runs, sum, worst);
    qemu_plugin_outs(text);
}

int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv) {
    int i;
    (void)info;
    for (i = 0; i < argc; i++) {
        /* The last bit of an Arm function's address says that its code is Thumb. */
        if (strncmp(argv[i], "from=", 5) == 0) from = strtoull(argv[i] + 5, NULL, 0) & ~(uint64_t)1;
        if (strncmp(argv[i], "to=", 3) == 0) to = strtoull(argv[i] + 3, NULL, 0) & ~(uint64_t)1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, translate);
    qemu_plugin_register_atexit_cb(id, say, NULL);
    return 0;
}
