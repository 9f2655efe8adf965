/* http_load: a closed loop of HTTP/1.1 clients. One thread, epoll, keep-alive.
 *
 *     http_load PORT PATH CONNECTIONS REQUESTS BODY_FILE
 *
 * Each connection posts the body, reads the whole answer (chunked or with a length) and starts again, until REQUESTS
 * were sent. Prints one JSON object: requests per second, the time of whole answers, and the age of each event of a
 * stream by mock_engine's "@<ns>" stamps. Durations in microseconds. `bad`: answers other than 200, and broken ones. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_AGES 8000000
#define LIMIT_S 150

typedef struct {
  int fd, busy, chunked;
  char *data;
  size_t length, capacity, scanned, head, chunk; /* head: its bytes, 0 while incomplete; chunk: where the next begins */
  long long body, begin;                         /* body: content-length, or -1 */
} Client;

static int port, epoll_fd;
static char request[1 << 20];
static size_t request_size;
static long to_send, sent, done, bad, events, totals;
static float *ages, *times;

static long long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

static double quantile(const float *sorted, long n, double q) { return n ? sorted[(long)(q * (n - 1) + 0.5)] : 0; }

static void open_client(Client *c) {
  int one = 1;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(c->fd, (void *)&address, sizeof address)) perror("connect"), exit(1);
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
  epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &e);
}

static void start(Client *c) {
  c->length = c->scanned = c->head = c->chunk = 0;
  c->chunked = 0;
  c->body = -1;
  c->busy = sent < to_send;
  if (!c->busy) return;
  sent++;
  c->begin = now_ns();
  if (send(c->fd, request, request_size, MSG_NOSIGNAL) != (ssize_t)request_size) perror("send"), exit(1);
}

/* Notes the age of every stamp that has arrived whole. */
static void scan(Client *c, long long now) {
  char *at, *end = c->data + c->length;
  while ((at = memchr(c->data + c->scanned, '@', end - c->data - c->scanned))) {
    char *digit = at + 1;
    while (digit < end && *digit >= '0' && *digit <= '9') digit++;
    if (digit == end) {
      c->scanned = at - c->data;
      return;
    }
    if (digit - at > 8 && events < MAX_AGES) ages[events++] = (now - atoll(at + 1)) / 1e3f;
    c->scanned = digit - c->data;
  }
  c->scanned = c->length;
}

static int read_head(Client *c) {
  char *end = memmem(c->data, c->length, "\r\n\r\n", 4);
  if (!end) return 0;
  c->head = c->chunk = end - c->data + 4;
  if (strncmp(c->data + 9, "200", 3) && ++bad < 3) fprintf(stderr, "%.*s\n", (int)c->length, c->data);
  for (char *line = c->data; line < end; line = strstr(line, "\r\n") + 2) {
    if (!strncasecmp(line, "content-length:", 15)) c->body = atoll(line + 15);
    if (!strncasecmp(line, "transfer-encoding: chunked", 26)) c->chunked = 1;
  }
  return 1;
}

static int is_complete(Client *c) {
  if (!c->head && !read_head(c)) return 0;
  if (!c->chunked) return c->body >= 0 && (long long)c->length >= (long long)c->head + c->body;
  for (;;) {
    if (c->chunk >= c->length) return 0;
    char *line = memmem(c->data + c->chunk, c->length - c->chunk, "\r\n", 2);
    if (!line) return 0;
    size_t size = strtoul(c->data + c->chunk, NULL, 16), next = line - c->data + 2 + size + 2;
    if (next > c->length) return 0;
    c->chunk = next;
    if (!size) return 1;
  }
}

/* A long stream is not kept: what was scanned and is behind us is dropped. */
static void forget(Client *c) {
  size_t past = c->chunk < c->scanned ? c->chunk : c->scanned;
  if (!c->chunked || past < 65536) return;
  size_t keep = c->head; /* strncmp and length fields are read once; the head need not stay */
  memmove(c->data + keep, c->data + past, c->length - past);
  c->length -= past - keep;
  c->chunk -= past - keep;
  c->scanned -= past - keep;
}

static void readable(Client *c) {
  if (c->capacity - c->length < 32768) c->data = realloc(c->data, (c->capacity *= 2) + 1);
  ssize_t got = recv(c->fd, c->data + c->length, c->capacity - c->length, 0);
  if (got <= 0) {
    if (c->busy) bad++, done++;
    close(c->fd);
    open_client(c);
    start(c);
    return;
  }
  long long now = now_ns();
  c->length += got;
  c->data[c->length] = 0;
  scan(c, now);
  if (is_complete(c)) {
    times[totals++] = (now - c->begin) / 1e3f;
    done++;
    start(c);
  } else {
    forget(c);
  }
}

int main(int argc, char **argv) {
  if (argc != 6) return fprintf(stderr, "usage: http_load PORT PATH CONNECTIONS REQUESTS BODY_FILE\n"), 2;
  int connections = atoi(argv[3]);
  static char body[1 << 19];
  FILE *f = fopen(argv[5], "r");
  if (!f) return perror(argv[5]), 1;
  size_t size = fread(body, 1, sizeof body, f);
  fclose(f);
  port = atoi(argv[1]);
  to_send = atol(argv[4]);
  signal(SIGPIPE, SIG_IGN);
  int n = snprintf(request, sizeof request,
                   "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nAccept: */*\r\n"
                   "Content-Length: %zu\r\n\r\n",
                   argv[2], port, size);
  memcpy(request + n, body, size);
  request_size = n + size;
  ages = malloc(sizeof(float) * MAX_AGES);
  times = malloc(sizeof(float) * (to_send + 1));
  epoll_fd = epoll_create1(0);
  Client *clients = calloc(connections, sizeof *clients);
  for (int i = 0; i < connections; i++) {
    clients[i].capacity = 1 << 17;
    clients[i].data = malloc(clients[i].capacity + 1);
    open_client(&clients[i]);
  }
  long long begin = now_ns();
  for (int i = 0; i < connections; i++) start(&clients[i]);
  struct epoll_event ready[256];
  while (done < to_send && now_ns() - begin < LIMIT_S * 1000000000LL) {
    int count = epoll_wait(epoll_fd, ready, 256, 1000);
    for (int i = 0; i < count; i++) readable(ready[i].data.ptr);
  }
  double seconds = (now_ns() - begin) / 1e9;
  qsort(times, totals, sizeof *times, ascending);
  qsort(ages, events, sizeof *ages, ascending);
  printf("{\"requests\":%ld,\"bad\":%ld,\"seconds\":%.4f,\"rps\":%.1f,\"events\":%ld,\"total_us_p50\":%.1f,"
         "\"total_us_p99\":%.1f,\"event_us_p50\":%.1f,\"event_us_p99\":%.1f}\n",
         done, bad + (to_send - done), seconds, done / seconds, events, quantile(times, totals, .5),
         quantile(times, totals, .99), quantile(ages, events, .5), quantile(ages, events, .99));
  return 0;
}
