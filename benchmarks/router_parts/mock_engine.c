/* mock_engine: answers at once what an engine would compute. One thread, epoll, HTTP/1.1 keep-alive.
 *
 *     mock_engine PORT ROLE INTERVAL_US GROUPS TOKENIZER_FILE      (ROLE: prefill or decode)
 *
 * Speaks three dialects: microserving's verbs, and what vllm-router and sglang-router ask of their engines in
 * prefill/decode mode. A whole answer ("stream" not true) comes at once. Streams are paced: one event and one send()
 * for each stream every INTERVAL_US, in GROUPS steps spread over the interval, as steps of an engine are. Every text
 * is "@" and the clock (CLOCK_MONOTONIC, ns), so that a client can tell how old it is. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define MAX_FDS 8192
#define RESERVE 65536

typedef enum { OURS, CHAT, COMPLETION, SGLANG } Dialect;

typedef struct {
  int fd, streaming;
  Dialect dialect;
  long id, left, total;
  char *in, *out; /* received and not parsed; to send and not taken by the kernel */
  size_t in_length, in_capacity, out_length, out_capacity;
} Connection;

static Connection *connections[MAX_FDS];
static int epoll_fd, is_prefill;
static long next_id, streams, groups, group;
static char *tokenizer;
static const char *role;

static long long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void *must(void *memory) {
  if (!memory) abort();
  return memory;
}

static void watch(Connection *c, int for_write) {
  struct epoll_event e = {.events = EPOLLIN | (for_write ? EPOLLOUT : 0), .data.fd = c->fd};
  epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e);
}

static void drop(Connection *c) {
  streams -= c->streaming;
  connections[c->fd] = NULL;
  close(c->fd);
  free(c->in);
  free(c->out);
  free(c);
}

static int push(Connection *c, const char *data, size_t size) {
  if (!c->out_length) {
    ssize_t sent = send(c->fd, data, size, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) return -1;
    if (sent > 0) data += sent, size -= sent;
    if (!size) return 0;
    watch(c, 1);
  }
  if (c->out_length + size > c->out_capacity) {
    c->out_capacity = 2 * (c->out_length + size);
    c->out = must(realloc(c->out, c->out_capacity));
  }
  memcpy(c->out + c->out_length, data, size);
  c->out_length += size;
  return 0;
}

static int flush(Connection *c) {
  ssize_t sent = send(c->fd, c->out, c->out_length, MSG_NOSIGNAL);
  if (sent < 0) return errno == EAGAIN ? 0 : -1;
  memmove(c->out, c->out + sent, c->out_length - sent);
  c->out_length -= sent;
  if (!c->out_length) watch(c, 0);
  return 0;
}

static int reply(Connection *c, const char *body) {
  char head[160];
  size_t length = strlen(body);
  int n = snprintf(head, sizeof head,
                   "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", length);
  if (length > 16384) return push(c, head, n) || push(c, body, length) ? -1 : 0;
  char whole[16384 + sizeof head];
  memcpy(whole, head, n);
  memcpy(whole + n, body, length);
  return push(c, whole, n + length);
}

static int send_event(Connection *c, const char *data) {
  char chunk[1400];
  int n = snprintf(chunk, sizeof chunk, "%zx\r\ndata: %s\n\n\r\n", strlen(data) + 8, data);
  return push(c, chunk, n);
}

/* One event of a stream; the last one is followed by what ends it. */
static int tick(Connection *c) {
  char data[1024];
  long done = c->total - --c->left;
  const char *finish = c->left ? "null" : "\"length\"";
  long long t = now_ns();
  if (c->dialect == SGLANG)
    snprintf(data, sizeof data,
             "{\"text\":\"@%lld\",\"output_ids\":[%ld],\"meta_info\":{\"id\":\"%032lx\",\"finish_reason\":%s,"
             "\"prompt_tokens\":8,\"completion_tokens\":%ld,\"cached_tokens\":0}}",
             t, done, c->id, c->left ? "null" : "{\"type\":\"length\"}", done);
  else if (c->dialect == CHAT)
    snprintf(data, sizeof data,
             "{\"id\":\"chatcmpl-%032lx\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,\"model\":\"mock\","
             "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"@%lld\"},\"logprobs\":null,\"finish_reason\":%s}]}",
             c->id, t, finish);
  else
    snprintf(data, sizeof data,
             "{\"id\":\"cmpl-%032lx\",\"object\":\"text_completion\",\"created\":1790000000,\"model\":\"mock\","
             "\"choices\":[{\"index\":0,\"text\":\"@%lld\",\"logprobs\":null,\"finish_reason\":%s%s}],\"usage\":null}",
             c->id, t, finish, c->dialect == OURS ? ",\"token_ids\":[77]" : "");
  if (send_event(c, data)) return -1;
  if (c->left) return 0;
  c->streaming = 0;
  streams--;
  if (c->dialect == OURS) {
    snprintf(data, sizeof data,
             "{\"id\":\"cmpl-%032lx\",\"object\":\"text_completion\",\"created\":1790000000,\"model\":\"mock\","
             "\"choices\":[],\"usage\":{\"prompt_tokens\":8,\"completion_tokens\":%ld,\"total_tokens\":%ld}}",
             c->id, done, done + 8);
    if (send_event(c, data)) return -1;
  }
  return send_event(c, "[DONE]") || push(c, "0\r\n\r\n", 5) ? -1 : 0;
}

static long number(const char *body, const char *key, long missing) {
  const char *at = strstr(body, key);
  if (!at) return missing;
  at += strlen(key);
  while (*at == ' ' || *at == ':') at++;
  return *at >= '0' && *at <= '9' ? atol(at) : missing;
}

static int is_streamed(const char *body) {
  const char *at = strstr(body, "\"stream\"");
  if (!at) return 0;
  at += 8;
  while (*at == ' ' || *at == ':') at++;
  return *at == 't';
}

static int generate(Connection *c, const char *path, const char *body) {
  char answer[4096];
  long tokens = number(body, "\"max_tokens\"", -1);
  if (tokens < 0) tokens = number(body, "\"max_completion_tokens\"", -1);
  if (tokens < 0) tokens = number(body, "\"max_new_tokens\"", 16);
  if (tokens < 1 || (is_prefill && strstr(body, "bootstrap_room"))) tokens = 1;
  c->dialect = strstr(path, "start_generate") ? OURS : strstr(path, "chat") ? CHAT : COMPLETION;
  if (!strcmp(path, "/generate")) c->dialect = SGLANG;
  c->id = ++next_id;
  if (is_streamed(body)) {
    static const char head[] =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    c->left = c->total = tokens;
    c->streaming = 1;
    streams++;
    return push(c, head, sizeof head - 1);
  }
  const char *transfer =
      c->dialect == OURS ? ""
                         : ",\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
                           "\"remote_engine_id\":\"e0\",\"remote_block_ids\":[1,2,3],\"remote_host\":\"127.0.0.1\","
                           "\"remote_port\":5600,\"tp_size\":1}";
  char usage[120];
  snprintf(usage, sizeof usage, "\"usage\":{\"prompt_tokens\":8,\"completion_tokens\":%ld,\"total_tokens\":%ld}",
           tokens, tokens + 8);
  if (c->dialect == SGLANG)
    snprintf(answer, sizeof answer,
             "{\"text\":\"@%lld\",\"output_ids\":[1],\"meta_info\":{\"id\":\"x\",\"finish_reason\":{\"type\":"
             "\"length\"},\"prompt_tokens\":8,\"completion_tokens\":%ld,\"cached_tokens\":0}}",
             now_ns(), tokens);
  else if (c->dialect == CHAT)
    snprintf(answer, sizeof answer,
             "{\"id\":\"chatcmpl-%032lx\",\"object\":\"chat.completion\",\"created\":1790000000,\"model\":\"mock\","
             "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"@%lld\"},\"logprobs\":null,"
             "\"finish_reason\":\"length\"}],%s%s}",
             c->id, now_ns(), usage, transfer);
  else
    snprintf(answer, sizeof answer,
             "{\"id\":\"cmpl-%032lx\",\"object\":\"text_completion\",\"created\":1790000000,\"model\":\"mock\","
             "\"choices\":[{\"index\":0,\"text\":\"@%lld\",\"logprobs\":null,\"finish_reason\":\"length\"%s}],%s%s}",
             c->id, now_ns(),
             c->dialect == OURS ? ",\"token_ids\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]" : "", usage, transfer);
  return reply(c, answer);
}

static int verb(Connection *c, const char *path) {
  char answer[4096];
  if (strstr(path, "prep_recv")) {
    char address[513];
    memset(address, 'A', sizeof address - 1);
    address[sizeof address - 1] = 0;
    snprintf(answer, sizeof answer,
             "{\"kv_append_metadata\":\"%s\",\"prefix_matched_length\":0,\"prompt_length\":8,\"request_id\":\"r\","
             "\"lease_ttl_s\":30.0}",
             address);
    return reply(c, answer);
  }
  if (strstr(path, "remote_send"))
    return reply(c, "{\"tokens_computed\":7,\"tokens_sent\":7,\"bytes_sent\":448,\"prefix_matched_length\":0,"
                    "\"prefill_ms\":1.5,\"transfer_ms\":0.1,\"exposed_ms\":0.2}");
  if (strstr(path, "renew")) return reply(c, "{\"request_id\":\"r\",\"lease_ttl_s\":30.0}");
  if (strstr(path, "/info")) {
    snprintf(answer, sizeof answer,
             "{\"protocol_version\":1,\"engine_id\":\"%s-0\",\"epoch\":\"e\",\"rank\":0,\"node_role\":\"%s\",\"model\":"
             "\"mock\",\"model_hash\":\"m\",\"kv_layout_hash\":\"l\",\"kv_bytes_per_token\":64,\"page_size\":16,"
             "\"total_pages\":100000,\"max_context\":8192,\"created\":1790000000,\"transports\":{}}",
             role, role);
    return reply(c, answer);
  }
  if (strstr(path, "/load"))
    return reply(c, "{\"running\":0,\"waiting\":0,\"reserved\":0,\"free_pages\":100000,\"cached_pages\":0,"
                    "\"total_pages\":100000,\"queued_prefill_tokens\":0,\"prefill_tokens_per_s\":1000.0,"
                    "\"decode_step_ms\":5.0,\"counters\":{}}");
  if (strstr(path, "/tokenizer")) return reply(c, tokenizer);
  return reply(c, "{}"); /* abort, commit */
}

static int handle(Connection *c, const char *path, const char *body) {
  if (strstr(path, "completions") || !strcmp(path, "/generate") || strstr(path, "start_generate"))
    return generate(c, path, body);
  if (strstr(path, "/microserving/")) return verb(c, path);
  if (strstr(path, "/models"))
    return reply(c, "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1790000000,"
                    "\"owned_by\":\"mock\",\"root\":\"mock\",\"max_model_len\":8192}]}");
  if (strstr(path, "server_info"))
    return reply(c, "{\"model_id\":\"mock\",\"model_path\":\"mock\",\"served_model_name\":\"mock\",\"tokenizer_path\":"
                    "\"mock\",\"dp_size\":1,\"tp_size\":1,\"disaggregation_mode\":\"null\",\"max_total_num_tokens\":"
                    "100000,\"version\":\"0.5.23\",\"max_running_requests\":256,\"internal_states\":[{}]}");
  if (strstr(path, "model_info"))
    return reply(c, "{\"model_path\":\"mock\",\"tokenizer_path\":\"mock\",\"is_generation\":true,"
                    "\"served_model_name\":\"mock\",\"model_type\":\"llama\",\"architectures\":[\"LlamaForCausalLM\"]}");
  if (strstr(path, "get_load"))
    return reply(c, "[{\"dp_rank\":0,\"num_reqs\":0,\"num_waiting_reqs\":0,\"num_tokens\":0}]");
  if (strstr(path, "/version")) return reply(c, "{\"version\":\"0.32.0\"}");
  return reply(c, "{\"status\":\"ready\"}");
}

/* Decodes a chunked body into `into`; returns where it ends in `from`, 0 when more must come. */
static size_t dechunk(const char *from, size_t length, char *into, size_t room) {
  size_t at = 0, size = 0;
  for (;;) {
    const char *line = memmem(from + at, length - at, "\r\n", 2);
    if (!line) return 0;
    size_t n = strtoul(from + at, NULL, 16), start = line - from + 2;
    if (start + n + 2 > length) return 0;
    if (size + n < room) memcpy(into + size, from + start, n), size += n;
    at = start + n + 2;
    if (!n) break;
  }
  into[size] = 0;
  return at;
}

/* Handles every complete request that was received. */
static int parse(Connection *c) {
  static char chunks[1 << 20];
  while (!c->streaming) {
    c->in[c->in_length] = 0;
    char *end = memmem(c->in, c->in_length, "\r\n\r\n", 4);
    if (!end) return 0;
    size_t head = end - c->in + 4, size = 0, total;
    int chunked = 0;
    for (char *line = c->in; line < end; line = strstr(line, "\r\n") + 2) {
      if (!strncasecmp(line, "content-length:", 15)) size = atol(line + 15);
      if (!strncasecmp(line, "transfer-encoding:", 18)) chunked = 1;
    }
    char *body = chunked ? chunks : c->in + head;
    if (chunked) {
      size_t used = dechunk(c->in + head, c->in_length - head, chunks, sizeof chunks);
      if (!used) return 0;
      total = head + used;
    } else {
      if (c->in_length < head + size) return 0;
      total = head + size;
    }
    char after = c->in[total], path[256];
    c->in[total] = 0;
    if (sscanf(c->in, "%*s %255[^ ?]", path) != 1 || handle(c, path, body)) return -1;
    c->in[total] = after;
    memmove(c->in, c->in + total, c->in_length - total);
    c->in_length -= total;
  }
  return 0;
}

static int receive(Connection *c) {
  if (c->in_capacity - c->in_length < RESERVE / 2) {
    c->in_capacity *= 2;
    c->in = must(realloc(c->in, c->in_capacity + 1));
  }
  ssize_t got = recv(c->fd, c->in + c->in_length, c->in_capacity - c->in_length, 0);
  if (got == 0 || (got < 0 && errno != EAGAIN)) return -1;
  if (got > 0) c->in_length += got;
  return got > 0 ? parse(c) : 0;
}

static void accept_all(int listener) {
  int one = 1, fd;
  while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
    if (fd >= MAX_FDS) {
      close(fd);
      continue;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    Connection *c = must(calloc(1, sizeof *c));
    c->fd = fd;
    c->in_capacity = RESERVE;
    c->in = must(malloc(c->in_capacity + 1));
    connections[fd] = c;
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
  }
}

static void tick_all(void) {
  group = (group + 1) % groups;
  for (int fd = 0; streams && fd < MAX_FDS; fd++) {
    Connection *c = connections[fd];
    if (c && c->streaming && c->id % groups == group && (tick(c) || parse(c))) drop(c);
  }
}

static char *read_file(const char *path) {
  FILE *f = fopen(path, "r");
  if (!f) return perror(path), exit(1), NULL;
  char *text = must(calloc(1, 8 << 20));
  if (!fread(text, 1, (8 << 20) - 1, f)) exit(1);
  fclose(f);
  return text;
}

int main(int argc, char **argv) {
  if (argc != 6) return fprintf(stderr, "usage: mock_engine PORT ROLE INTERVAL_US GROUPS TOKENIZER_FILE\n"), 2;
  role = argv[2];
  is_prefill = !strcmp(role, "prefill");
  groups = atol(argv[4]);
  tokenizer = read_file(argv[5]);
  signal(SIGPIPE, SIG_IGN);
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(listener, (void *)&address, sizeof address) || listen(listener, 1024)) return perror("bind"), 1;
  epoll_fd = epoll_create1(0);
  struct epoll_event e = {.events = EPOLLIN, .data.fd = listener};
  epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &e);
  int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  long long period = atoll(argv[3]) * 1000 / groups;
  struct timespec every = {period / 1000000000, period % 1000000000};
  timerfd_settime(timer, 0, &(struct itimerspec){every, every}, NULL);
  e.data.fd = timer;
  epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer, &e);
  struct epoll_event events[256];
  for (;;) {
    int n = epoll_wait(epoll_fd, events, 256, -1), due = 0;
    for (int i = 0; i < n; i++) {
      int fd = events[i].data.fd;
      unsigned long long times;
      Connection *c = connections[fd];
      if (fd == listener) accept_all(listener);
      else if (fd == timer) due = read(timer, &times, sizeof times) > 0;
      else if (c && (events[i].events & EPOLLOUT) && flush(c)) drop(c);
      else if (c && (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) && receive(c)) drop(c);
    }
    if (due) tick_all();
  }
}
