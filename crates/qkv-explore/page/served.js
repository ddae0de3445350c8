// The data source over HTTP: one function per route; responses are JSON or little-endian f32, errors carry a message
// and a hint.

/** An error of the server: a message, and perhaps a hint. */
export class ServerError extends Error {
  constructor({ error, hint }) {
    super(error);
    this.hint = hint ?? null;
  }
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ServerError({ error: 'the server does not answer', hint: 'is `qkv explore` still running?' });
  }
  if (!response.ok) {
    throw new ServerError(await response.json().catch(() => ({ error: `the server answered ${response.status}` })));
  }
  return response;
}

const query = (values) => new URLSearchParams(Object.entries(values).filter(([, value]) => value !== undefined)).toString();
const range = ([from, to]) => `${from}..${to}`;
const about = (run, what, values) => `/api/runs/${run.id}/${what}?${query(values)}`;
const json = async (path, options) => (await request(path, options)).json();

async function floats(path, options) {
  const response = await request(path, options);
  return { values: new Float32Array(await response.arrayBuffer()), sampled: response.headers.get('qkv-sampled') === '1' };
}

/** The source over HTTP. */
export function served() {
  return {
    ask: (model, text, target) => json('/api/run', {
      method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ model, text, target: target ?? null }),
    }),
    run: (id) => json(`/api/runs/${id}`),
    tokens: (run, side, from, to) => json(about(run, 'tokens', { side, from, to })),
    weights: async (run, layer, head, rows, cols) =>
      (await floats(about(run, 'weights', { layer, head, rows: range(rows), cols: range(cols) }))).values,
    grid: (run, size, pool) => floats(about(run, 'grid', { size, pool })),
    tile: (run, { layer, head, zoom, x, y, pool, exact }, signal) =>
      floats(about(run, 'tile', { layer, head, zoom, x, y, pool, exact: exact ? 1 : 0 }), { signal }),
    pair: (run, layer, head, q, k) => json(about(run, 'pair', { layer, head, query: q, key: k })),
    heads: (run) => json(about(run, 'heads', {})),
    rollout: async (run, group, layers, rows) => (await floats(about(run, 'rollout', { group, layers, rows: range(rows) }))).values,
    download: (run, values) => about(run, 'export', values),
  };
}
