// A fake engine: one thread, epoll, HTTP/1.1. The "model" string of the JSON body picks its answer:
//   m-json          1 KB JSON answer with Content-Length (also for any other name)
//   m-n<N>-g<MS>    chunked SSE, N events of about 200 bytes, MS ms apart (0: back to back)
//   m-n<N>-u<US>    the same, US microseconds apart
//   m-big<MB>       chunked stream of MB mebibytes, as fast as the peer reads
//   m-die<N>        N events, then RST            m-cut<N>  N events, then FIN without a last chunk
//   m-hang          head and one event, then silence
//   m-mute          nothing at all: an engine that still computes
// Each event carries T<CLOCK_MONOTONIC ns>, so a load generator on this machine gets its latency.
// GET /stats gives the counters; `aborted` are streams whose peer left before their end,
// `aborted_ns` is the CLOCK_MONOTONIC time at which the last of them was seen.
//     backend PORT
// It trusts its only callers, our benchmarks: a chunked request ends where "0 CRLF CRLF" is.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { FDS = 16384, EVENTS = 256, CHUNK = 65536 };
enum mode { EVENTS_MODE, BIG_MODE, DIE_MODE, CUT_MODE, HANG_MODE, MUTE_MODE };

typedef struct {
    int fd, streaming, waits_to_write;
    char *in, *out;
    size_t in_len, in_cap, out_len, out_off, out_cap;
    enum mode mode;
    int events, sent;
    long long gap_ns, next_ns, big_left;
} Conn;

static Conn *conns[FDS];
static int streams[FDS], stream_count, ep;
static long long requests, done, aborted, aborted_ns, sent_bytes;
static char answer[2048], big[CHUNK];
static int answer_len;

static long long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void *checked(void *memory) {
    if (!memory) abort();
    return memory;
}

static void put(Conn *c, const void *bytes, size_t n) {
    if (c->out_off == c->out_len) c->out_off = c->out_len = 0;
    if (c->out_len + n > c->out_cap) {
        c->out_cap = (c->out_len + n) * 2;
        c->out = checked(realloc(c->out, c->out_cap));
    }
    memcpy(c->out + c->out_len, bytes, n);
    c->out_len += n;
}

static void want_write(Conn *c, int yes) {
    if (c->waits_to_write == yes) return;
    c->waits_to_write = yes;
    struct epoll_event event = {.events = EPOLLIN | (yes ? EPOLLOUT : 0u), .data.fd = c->fd};
    epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &event);
}

static void end_stream(Conn *c) {
    c->streaming = 0;
    for (int i = 0; i < stream_count; i++)
        if (streams[i] == c->fd) streams[i] = streams[--stream_count];
}

static void drop(Conn *c) {
    if (c->streaming) {
        aborted++;
        aborted_ns = now_ns();
        end_stream(c);
    }
    close(c->fd);
    conns[c->fd] = NULL;
    free(c->in);
    free(c->out);
    free(c);
}

// Returns 1 when all is written, 0 when the peer is slow, -1 when the connection is gone.
static int flush(Conn *c) {
    while (c->out_off < c->out_len) {
        ssize_t n = send(c->fd, c->out + c->out_off, c->out_len - c->out_off, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) return want_write(c, 1), 0;
        if (n < 0) return drop(c), -1;
        c->out_off += (size_t)n;
        sent_bytes += n;
    }
    return want_write(c, 0), 1;
}

static int put_event(Conn *c) {
    char text[512], size[16];
    int n = snprintf(text, sizeof text,
                     "data: {\"id\":\"chatcmpl-abc123\",\"object\":\"chat.completion.chunk\","
                     "\"created\":1700000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":"
                     "{\"content\":\"T%020lld tok%04d\"},\"finish_reason\":null}]}\n\n\r\n",
                     now_ns(), c->sent++ % 10000);
    put(c, size, (size_t)snprintf(size, sizeof size, "%x\r\n", n - 2));
    put(c, text, (size_t)n);
    return flush(c);
}

static int finish(Conn *c) {
    static const char last[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    put(c, last, sizeof last - 1);
    end_stream(c);
    done++;
    return flush(c);
}

static int pump_big(Conn *c) {
    int state = flush(c);
    for (char size[16]; state > 0 && c->big_left > 0; c->big_left -= CHUNK) {
        put(c, size, (size_t)snprintf(size, sizeof size, "%x\r\n", CHUNK));
        put(c, big, CHUNK);
        put(c, "\r\n", 2);
        state = flush(c);
    }
    return state > 0 ? finish(c) : state;
}

// Sends what is due of a stream; -1 when the connection is gone.
static int pump(Conn *c) {
    if (c->mode == BIG_MODE) return pump_big(c);
    if (c->out_off < c->out_len) {
        int state = flush(c);
        if (state <= 0) return state;
    }
    while (c->sent < c->events) {
        if (c->gap_ns) {
            if (now_ns() < c->next_ns) return 0;
            c->next_ns += c->gap_ns;
        }
        int state = put_event(c);
        if (state <= 0) return state;
    }
    if (c->mode == HANG_MODE || c->mode == MUTE_MODE) return 0;
    if (c->mode == EVENTS_MODE) return finish(c);
    if (c->mode == DIE_MODE) {
        struct linger reset = {1, 0};
        setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    }
    end_stream(c);
    return drop(c), -1;
}

static void model_of(const char *body, size_t len, char model[64]) {
    const char *end = body + len, *p = memmem(body, len, "\"model\"", 7);
    strcpy(model, "m-json");
    if (!p) return;
    for (p += 7; p < end && (*p == ' ' || *p == ':');) p++;
    if (p == end || *p++ != '"') return;
    int n = 0;
    while (p < end && *p != '"' && n < 63) model[n++] = *p++;
    model[n] = 0;
}

static int put_json(Conn *c, const char *body, int len) {
    char head[256];
    put(c, head,
        (size_t)snprintf(head, sizeof head,
                         "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                         "Content-Length: %d\r\nServer: fake\r\n"
                         "x-request-id: 0123456789abcdef\r\n\r\n",
                         len));
    put(c, body, (size_t)len);
    return flush(c);
}

static int serve(Conn *c, const char *body, size_t len) {
    static const char head[] = "HTTP/1.1 200 OK\r\n"
                               "Content-Type: text/event-stream; charset=utf-8\r\n"
                               "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n"
                               "Server: fake\r\n\r\n";
    char model[64];
    int a, b;
    requests++;
    model_of(body, len, model);
    c->sent = 0, c->gap_ns = 2000000, c->mode = EVENTS_MODE;
    if (sscanf(model, "m-n%d-g%d", &a, &b) == 2) c->events = a, c->gap_ns = b * 1000000LL;
    else if (sscanf(model, "m-n%d-u%d", &a, &b) == 2) c->events = a, c->gap_ns = b * 1000LL;
    else if (sscanf(model, "m-big%d", &a) == 1)
        c->mode = BIG_MODE, c->big_left = (long long)a << 20;
    else if (sscanf(model, "m-die%d", &a) == 1) c->mode = DIE_MODE, c->events = a;
    else if (sscanf(model, "m-cut%d", &a) == 1) c->mode = CUT_MODE, c->events = a;
    else if (!strcmp(model, "m-hang")) c->mode = HANG_MODE, c->events = 1, c->gap_ns = 0;
    else if (!strcmp(model, "m-mute")) c->mode = MUTE_MODE, c->events = 0, c->gap_ns = 0;
    else return done++, put_json(c, answer, answer_len);
    if (c->mode != MUTE_MODE) put(c, head, sizeof head - 1);
    c->streaming = 1;
    streams[stream_count++] = c->fd;
    c->next_ns = now_ns();
    return pump(c);
}

static int stats(Conn *c) {
    char text[256];
    int n = snprintf(text, sizeof text,
                     "{\"requests\":%lld,\"done\":%lld,\"live\":%d,\"aborted\":%lld,"
                     "\"aborted_ns\":%lld,\"sent\":%lld}\n",
                     requests, done, stream_count, aborted, aborted_ns, sent_bytes);
    return put_json(c, text, n);
}

// Serves the whole requests that have arrived, one at a time while a stream runs.
static void parse(Conn *c) {
    int fd = c->fd;
    while (conns[fd] == c && !c->streaming && c->in_len) {
        char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
        if (!end) return;
        size_t head = (size_t)(end - c->in) + 4, total = head;
        end[2] = 0;  // for the searches; the line's end is put back below
        char *length = strcasestr(c->in, "\r\ncontent-length:");
        int chunked = strcasestr(c->in, "\r\ntransfer-encoding: chunked") != NULL;
        int expects = strcasestr(c->in, "\r\nexpect: 100-continue") != NULL;
        if (length) total += (size_t)atol(length + 17);
        end[2] = '\r';
        if (expects && c->in_len == head && total > head) {
            put(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
            flush(c);
            return;
        }
        if (chunked) {
            char *last = memmem(c->in + head, c->in_len - head, "0\r\n\r\n", 5);
            if (!last) return;
            total = (size_t)(last - c->in) + 5;
        }
        if (c->in_len < total) return;
        int asks_stats = !memcmp(c->in, "GET /stats", 10);
        int state = asks_stats ? stats(c) : serve(c, c->in + head, total - head);
        if (state < 0) return;
        memmove(c->in, c->in + total, c->in_len -= total);
    }
}

static void accept_all(int listener) {
    int one = 1;
    for (int fd; (fd = accept4(listener, 0, 0, SOCK_NONBLOCK)) >= 0;) {
        if (fd >= FDS) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        Conn *c = conns[fd] = checked(calloc(1, sizeof *c));
        c->fd = fd;
        c->in_cap = 16384;
        c->in = checked(malloc(c->in_cap));
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event);
    }
}

static void ready(Conn *c, unsigned events) {
    int fd = c->fd;
    if (events & (EPOLLERR | EPOLLHUP)) return drop(c);
    if (events & EPOLLOUT) {
        if (flush(c) < 0 || (c->streaming && pump(c) < 0)) return;
        parse(c);
    }
    if (conns[fd] != c || !(events & EPOLLIN)) return;
    if (c->in_len == c->in_cap) c->in = checked(realloc(c->in, c->in_cap *= 2));
    ssize_t n = recv(fd, c->in + c->in_len, c->in_cap - c->in_len, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN)) return drop(c);
    if (n > 0) {
        c->in_len += (size_t)n;
        parse(c);
    }
}

static int timed(const Conn *c) {
    return c->mode != BIG_MODE && c->gap_ns && c->sent <= c->events && c->out_off == c->out_len;
}

// Waits until something can be read or written, or a stream's next event is due.
static int wait_events(struct epoll_event *events) {
    long long best = -1, now = now_ns();
    for (int i = 0; i < stream_count; i++) {
        const Conn *c = conns[streams[i]];
        if (timed(c) && (best < 0 || c->next_ns < best)) best = c->next_ns;
    }
    if (best < 0) return epoll_wait(ep, events, EVENTS, -1);
    if (best > now) {  // epoll_wait counts in ms; gaps may be shorter
        struct timespec left = {(best - now) / 1000000000LL, (best - now) % 1000000000LL};
        struct pollfd own = {.fd = ep, .events = POLLIN};
        ppoll(&own, 1, &left, NULL);
    }
    return epoll_wait(ep, events, EVENTS, 0);
}

int main(int argc, char **argv) {
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in own = {.sin_family = AF_INET,
                              .sin_port = htons((uint16_t)atoi(argc > 1 ? argv[1] : "21000")),
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&own, sizeof own) || listen(listener, 1024)) {
        perror("backend");
        return 1;
    }
    char text[691];
    for (int i = 0; i < 690; i++) text[i] = i % 8 == 7 ? ' ' : 'a';
    text[690] = 0;
    for (int i = 0; i < CHUNK; i++) big[i] = i % 128 ? 'x' : '\n';
    answer_len = snprintf(answer, sizeof answer,
                          "{\"id\":\"chatcmpl-abc123\",\"object\":\"chat.completion\","
                          "\"created\":1700000000,\"model\":\"m\",\"choices\":[{\"index\":0,"
                          "\"message\":{\"role\":\"assistant\",\"content\":\"%s\"},"
                          "\"finish_reason\":\"stop\",\"logprobs\":null}],\"usage\":{"
                          "\"prompt_tokens\":12,\"completion_tokens\":140,\"total_tokens\":152},"
                          "\"system_fingerprint\":\"fp_0123456789\"}",
                          text);
    prctl(PR_SET_TIMERSLACK, 1UL);  // by default a sleep may take 50 us longer
    ep = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(ep, EPOLL_CTL_ADD, listener, &event);
    for (struct epoll_event events[EVENTS];;) {
        int n = wait_events(events);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) accept_all(listener);
            else if (conns[fd]) ready(conns[fd], events[i].events);
        }
        for (int i = 0; i < stream_count;) {
            Conn *c = conns[streams[i]];
            int fd = c->fd, before = stream_count;
            if (timed(c) && now_ns() >= c->next_ns && pump(c) >= 0 && conns[fd] == c) parse(c);
            if (stream_count == before) i++;
        }
    }
}
