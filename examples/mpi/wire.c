/* A wire between hosts that are network namespaces: carries frames between interfaces, each of
   which has a bandwidth in both directions, and delivers them after a delay. It stands in for tc's
   netem, which many kernels lack. Linux, as root; examples/mpi/hosts starts it.
     wire MBITS DELAY_MS INTERFACE...
   A frame for the Ethernet address 02:00:00:00:00:NN goes to interface NN, counted from 1; others
   go to all. Its bits pass the sender's line, then after the delay the receiver's, one frame after
   the other; lines hold up to 32 MB and then lose frames, as a switch does. */

#define _GNU_SOURCE /* ppoll */
#include <arpa/inet.h>
#include <linux/if_packet.h>
#include <linux/virtio_net.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

enum {
    MOST = 64, FRAME = 70000 /* with segments that the kernel has not cut yet */, ROOM = 32 << 20,
    HEADERS = 66 /* Ethernet, IP and TCP, of every segment */, GAP = 24 /* checksum, preamble, pause */
};

typedef struct frame {
    struct frame *next;
    double due;
    size_t size;
    char bytes[]; /* of the virtio header and the frame */
} frame;

/* An interface: when its lines will be free, and the frames that are on their way to it. */
typedef struct line {
    int socket;
    double up, down;
    frame *first, *last;
    size_t held;
} line;

static line lines[MOST];
static int n_lines;
static double seconds_per_byte, delay;

static int fail(const char *what) {
    perror(what);
    return 1;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double later(double a, double b) { return a > b ? a : b; }

/* Frames arrive without what hardware would do: large segments are not cut, checksums missing. */
static int open_line(line *l, const char *name) {
    const int on = 1, room = ROOM;
    struct sockaddr_ll at;
    memset(&at, 0, sizeof at);
    at.sll_family = AF_PACKET;
    at.sll_protocol = htons(ETH_P_ALL);
    at.sll_ifindex = (int)if_nametoindex(name);
    l->socket = at.sll_ifindex > 0 ? socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0) : -1;
    return l->socket >= 0 && setsockopt(l->socket, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on) == 0 &&
           setsockopt(l->socket, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on) == 0 &&
           setsockopt(l->socket, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room) == 0 &&
           setsockopt(l->socket, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room) == 0 &&
           bind(l->socket, (struct sockaddr *)&at, sizeof at) == 0;
}

/* Bytes of a frame on the line, with the headers of its segments. */
static double line_bytes(const char *bytes, size_t size) {
    struct virtio_net_hdr header;
    double whole = (double)(size - sizeof header), segments = 1;
    memcpy(&header, bytes, sizeof header);
    if (header.gso_size > 0 && whole > HEADERS) segments = (whole - HEADERS) / header.gso_size;
    return whole + GAP + (segments > 1 ? (segments - 1) * (HEADERS + GAP) : 0);
}

static void send_to(line *l, const char *bytes, size_t size, double leaves, double takes) {
    frame *f;
    if (l->held > ROOM || (f = (frame *)malloc(sizeof *f + size)) == NULL) return;
    l->down = later(leaves + delay, l->down + takes);
    f->next = NULL;
    f->due = l->down;
    f->size = size;
    memcpy(f->bytes, bytes, size);
    if (l->first == NULL) l->first = f;
    else l->last->next = f;
    l->last = f;
    l->held += size;
}

static void take(int from) {
    static char bytes[FRAME];
    static const unsigned char host[5] = {2, 0, 0, 0, 0};
    const size_t header = sizeof(struct virtio_net_hdr);
    long size;
    while ((size = (long)recv(lines[from].socket, bytes, sizeof bytes, 0)) > (long)header + 14) {
        const double takes = seconds_per_byte * line_bytes(bytes, (size_t)size);
        const double leaves = later(now(), lines[from].up) + takes;
        const int known = memcmp(bytes + header, host, sizeof host) == 0;
        lines[from].up = leaves;
        for (int to = 0; to < n_lines; to++)
            if (to != from && (!known || (unsigned char)bytes[header + 5] == to + 1))
                send_to(&lines[to], bytes, (size_t)size, leaves, takes);
    }
}

/* Sends the frames that are due; returns the time of the next one, or -1. */
static double give(line *l) {
    frame *f;
    while ((f = l->first) != NULL && f->due <= now()) {
        (void)!send(l->socket, f->bytes, f->size, 0);
        l->first = f->next;
        l->held -= f->size;
        free(f);
    }
    return l->first != NULL ? l->first->due : -1;
}

static int serve(void) {
    struct pollfd wanted[MOST];
    for (;;) {
        double next = -1, wait;
        struct timespec limit;
        for (int i = 0; i < n_lines; i++) {
            const double due = give(&lines[i]);
            if (due >= 0 && (next < 0 || due < next)) next = due;
            wanted[i].fd = lines[i].socket;
            wanted[i].events = POLLIN;
        }
        wait = next < 0 ? 1 : later(0, next - now());
        limit.tv_sec = (time_t)wait;
        limit.tv_nsec = (long)((wait - (double)limit.tv_sec) * 1e9);
        if (ppoll(wanted, (nfds_t)n_lines, &limit, NULL) < 0) return fail("ppoll");
        for (int i = 0; i < n_lines; i++) take(i);
    }
}

int main(int count, char **words) {
    const double mbits = count > 4 ? strtod(words[1], NULL) : 0;
    delay = count > 4 ? strtod(words[2], NULL) / 1e3 : -1;
    n_lines = count - 3;
    if (!(mbits > 0) || !(delay >= 0) || n_lines > MOST) {
        fputs("wire MBITS DELAY_MS INTERFACE INTERFACE...   up to 64 interfaces of this network namespace\n", stderr);
        return 2;
    }
    seconds_per_byte = 8e-6 / mbits;
    for (int i = 0; i < n_lines; i++)
        if (!open_line(&lines[i], words[3 + i])) return fail(words[3 + i]);
    (void)prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); /* nanoseconds */
    puts("ready");
    fflush(stdout);
    return serve();
}
