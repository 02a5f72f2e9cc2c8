/* moe_blocks.h - a cache of experts' blocks for devices that keep experts in external flash

   An extra of moe.h. A moe_loader reads the block of every chosen expert in every call. Consecutive
   calls often choose the same experts; the cache keeps the most recently used blocks in the
   caller's memory, and counts reads. MIT or public domain, as moe.h.

   Contents (search for the tag)
     >>cache       moe_blocks, moe_blocks_init, moe_blocks_pin
     >>private     the implementation

   Recipe
     1. Copy moe_blocks.h into your project, beside moe.h.
     2. Include it after moe.h. Where MOE_IMPLEMENTATION is defined, it brings its implementation.
     It needs no option and no other extra, no heap and no floating point, and works with
     MOE_NO_FLOAT and MOE_NO_TRAIN.

   First program: a slow memory is read once for two equal requests.
 * --- first program ---
 * #define MOE_IMPLEMENTATION
 * #include "moe.h"
 * #include "moe_blocks.h"
 * #include <stdio.h>
 *
 * static const unsigned char flash[64] = {1, 2, 3};
 *
 * static moe_status read_flash(void *ctx, size_t at, size_t size, void *to) {
 *     (void)ctx;
 *     memcpy(to, flash + at, size);
 *     return MOE_OK;
 * }
 *
 * int main(void) {
 *     static unsigned char memory[256];
 *     unsigned char block[32];
 *     moe_loader slow, cached;
 *     moe_blocks cache;
 *     slow.ctx = NULL;
 *     slow.fetch = read_flash;
 *     if (moe_blocks_init(&cache, &slow, 32, memory, sizeof memory)) return 1;
 *     cached = moe_blocks_loader(&cache); // pass it to moe_infer as the loader
 *     if (cached.fetch(cached.ctx, 0, 32, block)) return 1;
 *     if (cached.fetch(cached.ctx, 0, 32, block)) return 1;
 *     printf("%d bytes read, %d hits\n", (int)cache.bytes, (int)cache.hits);
 *     return 0;
 * }
 * --- end ---

   Options: those of moe.h.

   Manual
     On a device:
       static unsigned char memory[MOE_BLOCKS_MEMORY(4, 1500)];     four blocks of 1500 bytes
       moe_blocks_init(&cache, &flash_loader, 1500, memory, sizeof memory);
       cached = moe_blocks_loader(&cache);
       moe_infer(&digits, &cached, input, output, scratch, sizeof scratch);
     The header of a model states the bytes of its experts' blocks; with several MoE layers, take
     the largest. A block that is in the cache is copied to scratch memory and not read. A full
     cache evicts the least recently used block that is not pinned. If the cache holds as many
     blocks as a call reads, repeating the call with the same input reads nothing.

     A failed read keeps the bytes of its block that are in the cache, and all other blocks except
     the one that it was to replace.

     A score that reads experts (norm, attentive, competition) requests the first bytes of every
     block. The rest of such a block is read when it is requested.

     Errors and NULL are as in moe.h. Threads: a cache belongs to one thread at a time.
*/
#ifndef MOE_H
#error "moe_blocks.h: include moe.h before it"
#endif

#ifndef MOE_BLOCKS_H
#define MOE_BLOCKS_H

#if MOE_REAL_IS_DOUBLE
#define moe_blocks_init moe_blocks_init_f64
#define moe_blocks_loader moe_blocks_loader_f64
#define moe_blocks_pin moe_blocks_pin_f64
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>cache ================================================================================= */

/* An entry of the cache. */
typedef struct moe_blocks_slot {
    size_t at, size; /* offset of its block, and how many of the first bytes it holds; size 0: none */
    uint32_t used;   /* the number of the request that used it last */
    int pinned;      /* 1: it is not evicted */
} moe_blocks_slot;

/* A cache of blocks. Only the functions below write it; the counters of reads and hits may be set
   to 0 at any time. All counters wrap to 0 after 2^32 - 1. */
typedef struct moe_blocks {
    moe_loader loader;      /* reads the blocks */
    size_t block_size;      /* largest size of a block in bytes */
    moe_blocks_slot *slots; /* [n], in the caller's memory */
    unsigned char *memory;  /* [n, block_size], after the slots */
    size_t n;
    uint32_t requests;        /* number of requests: the clock of slot.used */
    uint32_t reads, bytes;    /* requests that were read, and bytes read for them */
    uint32_t hits, hit_bytes; /* requests that the cache served, and bytes copied for them */
} moe_blocks;

/* Bytes of memory for n blocks of `size` bytes at any alignment. */
#define MOE_BLOCKS_MEMORY(n, size) ((n) * (sizeof(moe_blocks_slot) + (size)) + 16)

/* Makes an empty cache in memory [memory_size]; memory and loader's ctx must outlive it. It holds
   as many blocks as fit. Errors: MOE_ERR_ARGUMENT (NULL, block_size 0), MOE_ERR_SPACE (not one
   block fits). */
MOE_API moe_status moe_blocks_init(moe_blocks *cache, const moe_loader *loader, size_t block_size, void *memory,
                                   size_t memory_size);
/* The loader that reads through the cache, for moe_infer. It returns what the cache's own loader
   returns; a request of more than block_size bytes goes directly to that. */
MOE_API moe_loader moe_blocks_loader(moe_blocks *cache);
/* Reads the block of `size` bytes at offset `at` and pins it (pin = 1), or unpins it (pin = 0;
   MOE_ERR_NOT_FOUND: it is not in the cache). at is the beginning of a block: first block of the
   layer + expert * bytes of a block. Errors: MOE_ERR_ARGUMENT (NULL; size 0 or above block_size),
   MOE_ERR_SPACE (all others are pinned; one must stay unpinned), else what the loader returns. */
MOE_API moe_status moe_blocks_pin(moe_blocks *cache, size_t at, size_t size, int pin);

#ifdef __cplusplus
}
#endif
#endif /* MOE_BLOCKS_H */

/* ==== >>private =============================================================================== */

#if defined(MOE_IMPLEMENTATION) && !defined(MOEI_BLOCKS_IMPLEMENTED)
#define MOEI_BLOCKS_IMPLEMENTED

#ifdef __cplusplus
extern "C" {
#endif

moe_status moe_blocks_init(moe_blocks *cache, const moe_loader *loader, size_t block_size, void *memory,
                           size_t memory_size) {
    unsigned char *start = (unsigned char *)memory;
    const size_t skip = memory != NULL ? (16 - (uintptr_t)start % 16) % 16 : 0;
    size_t i;
    if (cache == NULL || loader == NULL || loader->fetch == NULL || memory == NULL || block_size == 0)
        return MOE_ERR_ARGUMENT;
    if (memory_size < skip || block_size > (size_t)-1 - sizeof *cache->slots ||
        memory_size - skip < sizeof *cache->slots + block_size)
        return MOE_ERR_SPACE;
    memset(cache, 0, sizeof *cache);
    cache->loader = *loader;
    cache->block_size = block_size;
    cache->n = (memory_size - skip) / (sizeof *cache->slots + block_size);
    cache->slots = (moe_blocks_slot *)(void *)(start + skip);
    cache->memory = start + skip + cache->n * sizeof *cache->slots;
    for (i = 0; i < cache->n; i++) memset(&cache->slots[i], 0, sizeof cache->slots[i]);
    return MOE_OK;
}

/* The slot of the block at `at`, else the one to fill: empty, or least recently used. There is
   always one, because moe_blocks_pin leaves one unpinned. */
static moe_blocks_slot *moei_blocks_find(const moe_blocks *cache, size_t at) {
    moe_blocks_slot *oldest = NULL, *slot = cache->slots;
    size_t i;
    for (i = 0; i < cache->n; i++, slot++) {
        if (slot->size > 0 && slot->at == at) return slot;
        if (slot->pinned) continue;
        if (oldest == NULL ||
            (oldest->size > 0 && (slot->size == 0 || cache->requests - slot->used > cache->requests - oldest->used)))
            oldest = slot;
    }
    return oldest;
}

/* Brings the first size bytes of the block at `at` into the cache, in *slot. The bytes that it
   holds stay valid if the rest cannot be read. */
static moe_status moei_blocks_have(moe_blocks *cache, size_t at, size_t size, moe_blocks_slot **slot) {
    moe_blocks_slot *s = moei_blocks_find(cache, at);
    unsigned char *to;
    moe_status status;
    *slot = s;
    s->used = ++cache->requests;
    if (s->at != at) s->size = 0;
    s->at = at;
    if (s->size >= size) {
        cache->hits++;
        cache->hit_bytes += (uint32_t)size;
        return MOE_OK;
    }
    to = cache->memory + (size_t)(s - cache->slots) * cache->block_size;
    status = cache->loader.fetch(cache->loader.ctx, at + s->size, size - s->size, to + s->size);
    if (status != MOE_OK) return status;
    cache->reads++;
    cache->bytes += (uint32_t)(size - s->size);
    s->size = size;
    return MOE_OK;
}

static moe_status moei_blocks_fetch(void *ctx, size_t at, size_t size, void *to) {
    moe_blocks *cache = (moe_blocks *)ctx;
    moe_blocks_slot *slot = NULL;
    moe_status status = size > 0 && size <= cache->block_size ? moei_blocks_have(cache, at, size, &slot) : MOE_OK;
    if (status != MOE_OK) return status;
    if (slot != NULL) {
        memcpy(to, cache->memory + (size_t)(slot - cache->slots) * cache->block_size, size);
        return MOE_OK;
    }
    cache->requests++;
    status = cache->loader.fetch(cache->loader.ctx, at, size, to);
    if (status != MOE_OK) return status;
    cache->reads++;
    cache->bytes += (uint32_t)size;
    return MOE_OK;
}

moe_loader moe_blocks_loader(moe_blocks *cache) {
    moe_loader loader;
    loader.ctx = cache;
    loader.fetch = cache != NULL ? moei_blocks_fetch : NULL;
    return loader;
}

moe_status moe_blocks_pin(moe_blocks *cache, size_t at, size_t size, int pin) {
    moe_blocks_slot *slot;
    moe_status status;
    size_t i, free = 0;
    if (cache == NULL || size == 0 || size > cache->block_size) return MOE_ERR_ARGUMENT;
    slot = moei_blocks_find(cache, at);
    if (!pin) {
        if (slot->size == 0 || slot->at != at) return MOE_ERR_NOT_FOUND;
        slot->pinned = 0;
        return MOE_OK;
    }
    for (i = 0; i < cache->n; i++) free += !cache->slots[i].pinned;
    if (free < 2 && !slot->pinned) return MOE_ERR_SPACE;
    status = moei_blocks_have(cache, at, size, &slot);
    if (status == MOE_OK) slot->pinned = 1;
    return status;
}

#ifdef __cplusplus
}
#endif
#endif /* MOE_IMPLEMENTATION */
