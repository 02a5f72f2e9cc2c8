/* moe.h and every extra, for tests that are linked with an object of all of them (tests/run) or
   compile them themselves. */
#ifndef TESTS_ALL_H
#define TESTS_ALL_H

#include "../moe.h"

#ifndef MOE_TEST_SMALL /* whose messages would fill the memory of an AVR */
#include "../examples/extras/moe_check.h"
#endif
#include "../examples/extras/moe_blocks.h"
#include "../examples/extras/moe_classic.h"
#include "../examples/extras/moe_export.h"
#include "../examples/extras/moe_import.h"
#include "../examples/extras/moe_ranks.h"
#include "../examples/extras/moe_report.h"
#include "../examples/extras/moe_smooth.h"
#include "../examples/extras/moe_upcycle.h"

#include "../examples/extras/moe_layout.h" /* last: it describes the structs of what comes before it */

#ifndef MOE_NO_FLOAT
#include <string.h>

/* A table of the library's own, for programs that are linked with it. */
const moe_field *test_attention_fields(void);
#ifdef MOE_IMPLEMENTATION
const moe_field *test_attention_fields(void) { return moei_attention_fields; }
#endif

/* The network's own entry for the tensor of a name, whose flags a test may change; NULL:
   moe_net_find does not find it. */
static inline moe_tensor *net_tensor(const moe_net *net, const char *name) {
    moe_tensor found;
    size_t i;
    if (moe_net_find(net, name, &found) != MOE_OK) return NULL;
    for (i = 0; i < net->n_tensors; i++)
        if (strcmp(net->tensors[i].name, found.name) == 0) return &net->tensors[i];
    return NULL;
}

/* Sets all gradients of a trainable net to 0. */
static inline void net_zero_gradients(const moe_net *net) {
    size_t i;
    for (i = 0; i < net->n_tensors; i++)
        if (net->tensors[i].gradient != NULL)
            memset(net->tensors[i].gradient, 0, net->tensors[i].count * sizeof(moe_real));
}

/* Begins a new sequence of a model in its scratch memory. */
static inline void begin_sequence(void *scratch, size_t size) { memset(scratch, 0, size < 32 ? size : 32); }
#endif

#endif
