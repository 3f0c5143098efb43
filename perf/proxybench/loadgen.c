// Load generator: one thread, epoll, HTTP/1.1 on loopback. Closed loop, or open loop with -r (then
// a latency counts from the moment the request was due: a stalled proxy cannot hide its queue).
//     loadgen -p PORT [-c conns] [-d seconds] [-w warm-up s] [-r requests/s] [-m model]
//             [-b body bytes] [-P path] [-q class] [-s]      -s: "stream": true
// Each request differs: Content-Length walks over 64 sizes, traceparent and X-Request-Id never
// repeat, so nothing in the way can live off remembered heads. One JSON line comes out, times in
// us. `wait` is the share of its own time it was kept from running: how disturbed this round was.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef long long ns;
enum { VARIANTS = 64, SAMPLES = 2000000, EVENTS = 256, HEAD = 16384, PENDING = 1 << 20 };
enum part { PART_HEAD, PART_BODY };
enum chunk { CHUNK_SIZE, CHUNK_SIZE_LF, CHUNK_DATA, CHUNK_CR, CHUNK_LF, CHUNK_END };
static const ns UNTIL_CLOSE = 1LL << 60;

typedef struct {
    int fd, busy, status, closes, chunked, saw_body, stamp_digits, head_len;
    enum part part;
    enum chunk chunk;
    ns due, left, chunk_left, stamp;
    char head[HEAD];
} Conn;

typedef struct {
    char *bytes;
    int len, trace_at, id_at;
} Request;

typedef struct {
    ns *at;
    int n;
} Samples;

static Request requests[VARIANTS];
static Samples whole, first, event_delay;
static Conn *conns;
static int ep, port = 21000, conn_count = 64, idle_count, *idle;
static double seconds = 5, warm_up = 1, rate;
static ns measure_from, measure_to, pending[PENDING];
static unsigned pending_head, pending_tail;
static long long total, errors, not_200, reconnects, received;
static unsigned long long counter;

static ns now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void add(Samples *s, ns value) {
    if (s->n < SAMPLES) s->at[s->n++] = value;
}

static int ascending(const void *a, const void *b) {
    ns x = *(const ns *)a, y = *(const ns *)b;
    return (x > y) - (x < y);
}

static double quantile_us(const Samples *s, double q) {
    if (!s->n) return 0;
    int i = (int)(q * s->n);
    return (double)s->at[i < s->n ? i : s->n - 1] / 1000.0;
}

static void hex16(char *to, unsigned long long value) {
    for (int i = 15; i >= 0; i--, value >>= 4) to[i] = "0123456789abcdef"[value & 15];
}

static void open_conn(Conn *c) {
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (void *)&to, sizeof to)) {
        perror("loadgen: connect");
        exit(2);
    }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &event);
    c->busy = 0;
}

static void reopen(Conn *c) {
    close(c->fd);
    open_conn(c);
    reconnects++;
}

static void begin(Conn *c, ns due) {
    Request *r = &requests[counter % VARIANTS];
    unsigned long long mixed = ++counter * 0x9E3779B97F4A7C15ULL;
    hex16(r->bytes + r->trace_at, mixed);
    hex16(r->bytes + r->trace_at + 16, counter);
    hex16(r->bytes + r->id_at, mixed ^ counter);
    c->due = due, c->busy = 1, c->part = PART_HEAD, c->head_len = 0, c->saw_body = 0;
    c->chunk = CHUNK_SIZE, c->chunk_left = 0, c->stamp_digits = 0;
    for (int sent = 0; sent < r->len;) {
        ssize_t n = send(c->fd, r->bytes + sent, (size_t)(r->len - sent), MSG_NOSIGNAL);
        if (n >= 0) {
            sent += (int)n;
            continue;
        }
        if (++errors > 10000) exit(3);
        reopen(c);
        c->busy = 1;
        sent = 0;
    }
}

static void finish(Conn *c, ns now) {
    c->busy = 0;
    total++;
    if (c->status != 200) not_200++;
    if (c->due >= measure_from && now <= measure_to) add(&whole, now - c->due);
    if (c->closes) reopen(c);
    if (rate <= 0) {
        if (now < measure_to) begin(c, now_ns());
    } else if (pending_head != pending_tail) begin(c, pending[pending_head++ % PENDING]);
    else idle[idle_count++] = (int)(c - conns);
}

// Looks for T and 20 digits in a body, across any split: when an SSE event was made.
static void find_stamps(Conn *c, const char *p, ns n, ns now) {
    for (const char *end = p + n; p < end; p++) {
        if (!c->stamp_digits) {
            if (!(p = memchr(p, 'T', (size_t)(end - p)))) return;
            c->stamp_digits = 1, c->stamp = 0;
        } else if (*p >= '0' && *p <= '9') {
            c->stamp = c->stamp * 10 + (*p - '0');
            if (++c->stamp_digits < 21) continue;
            if (now > measure_from) add(&event_delay, now - c->stamp);
            c->stamp_digits = 0;
        } else {
            c->stamp_digits = *p == 'T';
            c->stamp = 0;
        }
    }
}

// Takes bytes of an answer's head; returns how many were used.
static ns take_head(Conn *c, const char *p, ns n, ns now) {
    ns room = HEAD - 1 - c->head_len, k = n < room ? n : room;
    if (!k) {
        fprintf(stderr, "loadgen: an answer's head is above %d bytes\n", HEAD);
        exit(4);
    }
    int before = c->head_len;
    memcpy(c->head + before, p, (size_t)k);
    c->head_len += (int)k;
    c->head[c->head_len] = 0;
    char *end = memmem(c->head, (size_t)c->head_len, "\r\n\r\n", 4);
    if (!end) return k;
    ns used = end - c->head + 4 - before;
    end[2] = 0;
    c->status = atoi(c->head + 9);
    if (c->status == 100) return c->head_len = 0, used;
    char *length = strcasestr(c->head, "\r\ncontent-length:");
    c->chunked = strcasestr(c->head, "\r\ntransfer-encoding: chunked") != NULL;
    c->closes = strcasestr(c->head, "\r\nconnection: close") != NULL;
    c->left = length ? atoll(length + 17) : 0;
    if (!c->chunked && !length) c->left = UNTIL_CLOSE, c->closes = 1;
    c->part = PART_BODY;
    if (!c->chunked && !c->left) finish(c, now);
    return used;
}

static int hex_value(char ch) {
    if (ch >= '0' && ch <= '9') return ch - '0';
    ch |= 32;
    return ch >= 'a' && ch <= 'f' ? ch - 'a' + 10 : -1;
}

static ns take_chunk(Conn *c, const char *p, ns n, ns now) {
    int digit;
    ns k;
    switch (c->chunk) {
    case CHUNK_SIZE:
        if (*p == '\r') c->chunk = CHUNK_SIZE_LF;
        else if ((digit = hex_value(*p)) >= 0) c->chunk_left = c->chunk_left * 16 + digit;
        return 1;
    case CHUNK_SIZE_LF:
        c->chunk = c->chunk_left ? CHUNK_DATA : CHUNK_END;
        c->left = 2;  // CR LF after the last chunk
        return 1;
    case CHUNK_DATA:
        k = n < c->chunk_left ? n : c->chunk_left;
        find_stamps(c, p, k, now);
        if (!(c->chunk_left -= k)) c->chunk = CHUNK_CR;
        return k;
    case CHUNK_CR:
        c->chunk = CHUNK_LF;
        return 1;
    case CHUNK_LF:
        c->chunk = CHUNK_SIZE;
        return 1;
    case CHUNK_END:
        if (!--c->left) finish(c, now);
        return 1;
    }
    return n;
}

static void take(Conn *c, const char *p, ns n, ns now) {
    received += n;
    while (n > 0) {
        ns used;
        if (!c->busy) {
            errors++;  // bytes nobody asked for
            return;
        }
        if (c->part == PART_HEAD) used = take_head(c, p, n, now);
        else {
            if (!c->saw_body && c->due >= measure_from) add(&first, now - c->due);
            c->saw_body = 1;
            if (c->chunked) used = take_chunk(c, p, n, now);
            else {
                used = n < c->left ? n : c->left;
                find_stamps(c, p, used, now);
                if (!(c->left -= used)) {
                    finish(c, now);
                    if (n > used) errors++;
                    return;
                }
            }
        }
        p += used, n -= used;
    }
}

static void ready(Conn *c, ns now) {
    static char buffer[262144];
    ssize_t n = recv(c->fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) return;
    if (n > 0) return take(c, buffer, n, now);
    int busy = c->busy;
    if (busy && c->part == PART_BODY && !c->chunked && c->left > UNTIL_CLOSE / 2)
        return finish(c, now);
    reopen(c);
    if (!busy) return;
    if (++errors > 100000) exit(3);
    begin(c, now_ns());
}

static void make_requests(const char *path, const char *model, const char *qos, int size,
                          int stream) {
    for (int i = 0; i < VARIANTS; i++) {
        int body_size = size + i, room = body_size + 1024;
        char *body = malloc((size_t)room), *all = malloc((size_t)room + 1024);
        if (!body || !all) abort();
        int n = snprintf(body, (size_t)room,
                         "{\"model\":\"%s\",%s\"messages\":[{\"role\":\"user\","
                         "\"content\":\"",
                         model, stream ? "\"stream\":true," : "");
        while (n < body_size - 4) body[n] = n % 8 ? 'a' : ' ', n++;
        n += snprintf(body + n, (size_t)(room - n), "\"}]}");
        int head = snprintf(all, (size_t)room + 1024,
                            "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
                            "Content-Type: application/json\r\nAuthorization: Bearer bench\r\n"
                            "User-Agent: loadgen\r\nAccept: */*\r\nX-QoS-Class: %s\r\n"
                            "X-Request-Id: 0000000000000000\r\n"
                            "traceparent: 00-00000000000000000000000000000000"
                            "-00f067aa0ba902b7-01\r\n"
                            "Content-Length: %d\r\n\r\n",
                            path, port, qos, n);
        memcpy(all + head, body, (size_t)n);
        free(body);
        requests[i] = (Request){all, head + n, (int)(strstr(all, ": 00-") - all) + 5,
                                (int)(strstr(all, "Id: 0") - all) + 4};
    }
}

static void run(void) {
    ns start = now_ns(), next = start;
    long long issued = 0;
    measure_from = start + (ns)(warm_up * 1e9);
    measure_to = measure_from + (ns)(seconds * 1e9);
    for (int i = 0; i < conn_count; i++) {
        if (rate > 0) idle[idle_count++] = i;
        else begin(&conns[i], now_ns());
    }
    for (struct epoll_event events[EVENTS];;) {
        ns now = now_ns();
        int busy = 0;
        if (now > measure_to)
            for (int i = 0; i < conn_count; i++) busy += conns[i].busy;
        if (now > measure_to + 2000000000LL || (now > measure_to && !busy)) return;
        while (rate > 0 && next <= now && next < measure_to) {
            if (idle_count) {
                Conn *c = &conns[idle[0]];
                memmove(idle, idle + 1, (size_t)--idle_count * sizeof *idle);
                begin(c, next);
            } else if (pending_tail - pending_head < PENDING) {
                pending[pending_tail++ % PENDING] = next;
            }
            next = start + (ns)((double)++issued * 1e9 / rate);
        }
        ns wait = 100000000;
        if (rate > 0 && next < measure_to && (wait = next - now_ns()) < 0) wait = 0;
        struct timespec timeout = {wait / 1000000000, wait % 1000000000};
        int n = epoll_pwait2(ep, events, EVENTS, &timeout, NULL);
        now = now_ns();
        for (int i = 0; i < n; i++) ready(events[i].data.ptr, now);
    }
}

static double waited_s(void) {
    long long ran = 0, waited = 0;
    FILE *file = fopen("/proc/self/schedstat", "r");
    if (!file) return 0;
    if (fscanf(file, "%lld %lld", &ran, &waited) != 2) waited = 0;
    fclose(file);
    return (double)waited / 1e9;
}

int main(int argc, char **argv) {
    const char *model = "m-json", *path = "/v1/chat/completions", *qos = "P1";
    int size = 400, stream = 0;
    for (int o; (o = getopt(argc, argv, "p:c:d:w:r:m:b:P:q:s")) != -1;) switch (o) {
        case 'p': port = atoi(optarg); break;
        case 'c': conn_count = atoi(optarg); break;
        case 'd': seconds = atof(optarg); break;
        case 'w': warm_up = atof(optarg); break;
        case 'r': rate = atof(optarg); break;
        case 'm': model = optarg; break;
        case 'b': size = atoi(optarg); break;
        case 'P': path = optarg; break;
        case 'q': qos = optarg; break;
        case 's': stream = 1; break;
        default: return 2;
        }
    Samples *all[] = {&whole, &first, &event_delay};
    for (int i = 0; i < 3; i++)
        if (!(all[i]->at = malloc(SAMPLES * sizeof(ns)))) abort();
    conns = calloc((size_t)conn_count, sizeof *conns);
    idle = malloc((size_t)conn_count * sizeof *idle);
    if (!conns || !idle) abort();
    make_requests(path, model, qos, size, stream);
    ep = epoll_create1(0);
    for (int i = 0; i < conn_count; i++) open_conn(&conns[i]);
    ns start = now_ns();
    run();
    double wait = waited_s() / ((double)(now_ns() - start) / 1e9);
    for (int i = 0; i < 3; i++) qsort(all[i]->at, (size_t)all[i]->n, sizeof(ns), ascending);
    printf("{\"total\":%lld,\"rps\":%.1f,\"p50_us\":%.1f,\"p99_us\":%.1f,\"ttfb_p50_us\":%.1f,"
           "\"events\":%d,\"event_p50_us\":%.1f,\"event_p99_us\":%.1f,\"mb\":%.1f,\"errors\":%lld,"
           "\"not_200\":%lld,\"reconnects\":%lld,\"backlog\":%u,\"wait\":%.3f}\n",
           total, whole.n / seconds, quantile_us(&whole, .5), quantile_us(&whole, .99),
           quantile_us(&first, .5), event_delay.n, quantile_us(&event_delay, .5),
           quantile_us(&event_delay, .99), (double)received / 1048576.0, errors, not_200,
           reconnects, pending_tail - pending_head, wait);
}
