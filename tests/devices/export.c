/* Stand-in for the exporter while that is written: export CSV FOLDER. */
#include <stdio.h>
#include <stdlib.h>
static FILE *f;
static void open_(const char *folder, const char *name) {
    char path[1000];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    f = fopen(path, "w");
    if (f == NULL) exit(1);
}
static void model(const char *folder, const char *name, int bits) {
    unsigned seed = 12345, i;
    open_(folder, name);
    fprintf(f, "#include \"standin.h\"\n");
    fprintf(f, "static const %s digits_weights[10 * 64 * 8] MOE_FLASH = {", bits == 32 ? "float" : "signed char");
    for (i = 0; i < 5120; i++) {
        seed = seed * 1664525 + 1013904223;
        if (bits == 32) fprintf(f, "%s%d.0f", i % 16 == 0 ? ",\n" + (i == 0) : ",", (int)(seed >> 25) - 64);
        else fprintf(f, "%s%d", i % 16 == 0 ? ",\n" + (i == 0) : ",", (int)(seed >> 25) - 64);
    }
    fprintf(f, "};\nstatic const moe_model digits = {digits_weights};\nenum { digits_scratch = 64, digits_products = 1280 };\n");
    fclose(f);
}
int main(int argc, char **argv) {
    static int rows[50][65];
    int i, k, n = 0;
    FILE *csv = fopen(argv[1], "r");
    (void)argc;
    while (n < 1700) {
        for (k = 0; k < 65; k++)
            if (fscanf(csv, "%d,", &rows[n % 50][k]) != 1) return 1;
        n++;
    }
    open_(argv[2], "digits.h");
    fprintf(f, "static const uint8_t device_pixels[50][64] DEVICE_FLASH = {\n");
    for (i = 0; i < 50; i++) {
        fprintf(f, "{");
        for (k = 0; k < 64; k++) fprintf(f, "%d,", rows[i][k]);
        fprintf(f, "},\n");
    }
    fprintf(f, "};\nstatic const uint8_t device_labels[50] DEVICE_FLASH = {");
    for (i = 0; i < 50; i++) fprintf(f, "%d,", rows[i][64]);
    fprintf(f, "};\n");
    fclose(f);
    model(argv[2], "int8.h", 8);
    model(argv[2], "int4.h", 4);
    model(argv[2], "float.h", 32);
    return 0;
}
