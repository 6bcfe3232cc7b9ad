/* The cables of emulated nodes that are far apart: `relay MICROSECONDS NAMESPACE...`, which benchmarks/nodes.py compiles.

   Makes a TUN device `cable` in each network namespace, prints "ready", and hands each IPv4 packet on to the namespace
   that its address names (10.77.0.1 is the first) after the delay. It runs until it is killed; the devices end with it.
   The kernel's own way, `tc ... netem delay`, is a module that small kernels lack; TUN is not. In C, as a packet costs
   a few microseconds here and ten times that in Python, which an exchange between many ranks would measure. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { LARGEST = 65536, MOST_NODES = 254, READS_IN_A_ROW = 32 };

struct packet {
    struct packet *next;
    long long due; /* nanoseconds */
    int destination;
    int length;
    unsigned char bytes[];
};

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int make_cable(const char *name) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", name);
    int netns = open(path, O_RDONLY | O_CLOEXEC);
    if (netns < 0 || setns(netns, CLONE_NEWNET) != 0) fail(path);
    close(netns);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (device < 0) fail("/dev/net/tun");
    struct ifreq request;
    memset(&request, 0, sizeof request);
    strcpy(request.ifr_name, "cable");
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    if (ioctl(device, TUNSETIFF, &request) != 0) fail("TUNSETIFF");
    return device;
}

int main(int count, char **arguments) {
    int nodes = count - 2;
    if (nodes < 1 || nodes > MOST_NODES) return 2;
    long long delay = atoll(arguments[1]) * 1000;
    struct pollfd devices[MOST_NODES];
    for (int node = 0; node < nodes; node++) {
        devices[node].fd = make_cable(arguments[node + 2]);
        devices[node].events = POLLIN;
    }
    prctl(PR_SET_TIMERSLACK, 1000UL); /* else a wait is 50 microseconds too long */
    puts("ready");
    fflush(stdout);

    /* All packets have the same delay, so they leave in the order in which they come. */
    struct packet *first = NULL, *last = NULL;
    unsigned char buffer[LARGEST];
    for (;;) {
        struct timespec timeout, *wait = NULL;
        if (first != NULL) {
            long long left = first->due - now();
            if (left < 0) left = 0;
            timeout.tv_sec = left / 1000000000LL;
            timeout.tv_nsec = left % 1000000000LL;
            wait = &timeout;
        }
        if (ppoll(devices, nodes, wait, NULL) < 0 && errno != EINTR) fail("ppoll");
        for (int node = 0; node < nodes; node++) {
            if (!(devices[node].revents & POLLIN)) continue;
            for (int reads = 0; reads < READS_IN_A_ROW; reads++) {
                int length = read(devices[node].fd, buffer, sizeof buffer);
                if (length <= 0) break;
                /* The last byte of an IPv4 packet's destination. Others, such as of IPv6, have no receiver. */
                if (length < 20 || buffer[0] >> 4 != 4) continue;
                int destination = buffer[19] - 1;
                if (destination < 0 || destination >= nodes) continue;
                struct packet *packet = malloc(sizeof *packet + length);
                if (packet == NULL) fail("malloc");
                packet->next = NULL;
                packet->due = now() + delay;
                packet->destination = destination;
                packet->length = length;
                memcpy(packet->bytes, buffer, length);
                if (last == NULL) first = packet;
                else last->next = packet;
                last = packet;
            }
        }
        while (first != NULL && first->due <= now()) {
            struct packet *packet = first;
            /* What a device does not take is lost, as on a cable; TCP sends it again. */
            if (write(devices[packet->destination].fd, packet->bytes, packet->length) < 0 && errno == EBADF) fail("write");
            first = packet->next;
            if (first == NULL) last = NULL;
            free(packet);
        }
    }
}
