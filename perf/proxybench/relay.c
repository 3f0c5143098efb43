// The floor: the thinnest hop that sockets allow. One upstream connection per client connection,
// bytes copied both ways, nothing parsed. What it costs is kernel and copy alone, so every proxy is
// given as a multiple of it.
//     relay PORT UPSTREAM_PORT
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { FDS = 65536, EVENTS = 256, BUFFER = 65536 };
static int peer[FDS];
static int ep;

static struct sockaddr_in loopback(const char *port) {
    return (struct sockaddr_in){.sin_family = AF_INET,
                                .sin_port = htons((uint16_t)atoi(port)),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static void watch(int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event);
}

static void join(int client, const struct sockaddr_in *upstream) {
    int one = 1, server = socket(AF_INET, SOCK_STREAM, 0);
    if (server < 0 || server >= FDS || client >= FDS ||
        connect(server, (const void *)upstream, sizeof *upstream)) {
        close(client);
        if (server >= 0) close(server);
        return;
    }
    setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    peer[client] = server;
    peer[server] = client;
    watch(client);
    watch(server);
}

static void copy(int from) {
    static char buffer[BUFFER];
    int to = peer[from];
    if (!to) return;
    ssize_t got = recv(from, buffer, sizeof buffer, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    for (ssize_t sent = 0; got > 0 && sent < got;) {
        ssize_t n = send(to, buffer + sent, (size_t)(got - sent), MSG_NOSIGNAL);
        if (n < 0) got = 0;
        else sent += n;
    }
    if (got <= 0) {
        peer[from] = peer[to] = 0;
        close(from);
        close(to);
    }
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: relay PORT UPSTREAM_PORT\n");
        return 2;
    }
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in own = loopback(argv[1]), upstream = loopback(argv[2]);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&own, sizeof own) || listen(listener, 1024)) {
        perror("relay");
        return 1;
    }
    ep = epoll_create1(0);
    watch(listener);
    for (struct epoll_event events[EVENTS];;) {
        int n = epoll_wait(ep, events, EVENTS, -1);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd, client;
            if (fd != listener) copy(fd);
            else
                while ((client = accept4(listener, 0, 0, 0)) >= 0) join(client, &upstream);
        }
    }
}
