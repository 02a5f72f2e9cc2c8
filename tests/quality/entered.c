/* Prints the address of each function that one token through the default layer enters: no more than
   90, so that a reader can follow x through it. tests/port/headers.sh (check entered) counts them
   and names them when there are more.
     gcc -std=c99 -O0 -no-pie -finstrument-functions -DMOE_NO_SIMD -I. tests/quality/entered.c \
         -o entered -lm
     ./entered | wc -l */

#define MOE_IMPLEMENTATION
#include "moe.h"

#include <stdio.h>

enum { WIDTH = 64, MOST = 1000 };

static void *entered[MOST];
static int n_entered, counting;

void __cyg_profile_func_enter(void *function, void *caller) __attribute__((no_instrument_function));
void __cyg_profile_func_exit(void *function, void *caller) __attribute__((no_instrument_function));

void __cyg_profile_func_enter(void *function, void *caller) {
    int i = 0;
    (void)caller;
    if (!counting) return;
    while (i < n_entered && entered[i] != function) i++;
    if (i == n_entered && n_entered < MOST) entered[n_entered++] = function;
}

void __cyg_profile_func_exit(void *function, void *caller) {
    (void)function;
    (void)caller;
}

int main(void) {
    static double workspace[1 << 14];
    static moe_real x[WIDTH], y[WIDTH];
    moe_layer_config config = {0};
    moe_layer layer;
    moe_call call = {0};
    moe_error error;
    moe_status status;
    int i;
    config.router.d_model = WIDTH;
    if (moe_layer_create(&layer, &config, 0, 1, NULL, &error) != MOE_OK) {
        puts(error.message);
        return 1;
    }
    for (i = 0; i < WIDTH; i++) x[i] = (moe_real)i / WIDTH;
    call.n_tokens = 1;
    call.x = x;
    counting = 1;
    status = moe_layer_forward(&layer, &call, y, workspace, sizeof workspace, NULL);
    counting = 0;
    for (i = 0; i < n_entered; i++) printf("%p\n", entered[i]);
    moe_layer_free(&layer);
    return status != MOE_OK;
}
