// The state of the page: one flat object in the URL fragment, so that a URL is a picture and the back button works.
// Drawing code subscribes, controls call `choose`. Knows neither views nor the server.

const whole = { read: (text) => (/^\d+$/.test(text) ? Number(text) : undefined), write: String };
const fraction = { read: (text) => (text !== '' && Number.isFinite(Number(text)) ? Number(text) : undefined), write: (value) => String(Number(value.toPrecision(6))) };
const words = { read: (text) => text, write: String };
const flag = { read: (text) => text === '1', write: (value) => (value ? '1' : '0') };
const among = (...values) => ({ read: (text) => (values.includes(text) ? text : undefined), write: String });
const numbers = (part) => ({
  read: (text) => {
    const list = text.split(',').map(part.read);
    return list.includes(undefined) ? undefined : list;
  },
  write: (list) => list.map(part.write).join(','),
});
const head = { read: (text) => (text === 'mean' ? 'mean' : whole.read(text)), write: String };

/** Every entry: its default, and how it is parsed from and written to the URL. */
const choices = {
  // what is shown
  model: [null, whole], text: [null, words], target: [null, words],
  model2: [null, whole], text2: [null, words],
  view: [null, words], layer: [null, whole], head: [null, head],
  cell: [null, numbers(whole)], step: [null, whole], depth: [null, whole],
  rows: [[], numbers(whole)], cols: [[], numbers(whole)], fold: ['mean', among('mean', 'sum')],
  shade: ['both', among('both', 'words')], followed: [false, flag],
  at: [null, numbers(fraction)], pool: ['max', among('max', 'mean')], sort: [null, words],
  // how it is drawn
  scale: [null, among('linear', 'log', 'rank')], palette: ['sea', words], theme: ['auto', among('auto', 'light', 'dark')],
  words: [false, flag], special: [true, flag], sink: [true, flag], renormalize: [false, flag],
  mass: [1, fraction], layout: ['auto', among('auto', 'across', 'down')],
};

const listeners = new Set();
let now = read(location.hash);

function read(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ''));
  return Object.fromEntries(Object.entries(choices).map(([name, [silent, codec]]) => {
    const text = given.get(name);
    return [name, text === null ? silent : codec.read(text) ?? silent];
  }));
}

function write(state) {
  const said = Object.entries(choices).flatMap(([name, [silent, codec]]) => {
    const value = state[name];
    if (value === null || value === undefined) return [];
    const text = codec.write(value);
    return silent !== null && text === codec.write(silent) ? [] : [`${name}=${encodeURIComponent(text).replaceAll('%2C', ',')}`];
  });
  return said.length ? `#${said.join('&')}` : location.pathname + location.search;
}

/** The current state. */
export const chosen = () => now;

/** Changes entries. `push` adds a history entry; otherwise the current one is replaced. */
export function choose(patch, { push = false } = {}) {
  const before = now;
  now = { ...now, ...patch };
  const address = write(now);
  try {
    if (address !== write(before)) history[push ? 'pushState' : 'replaceState'](null, '', address);
  } catch { /* a browser may forbid or limit this, as for a file on disk: the page works without it */ }
  for (const listener of listeners) listener(now, before);
}

/** Subscribes to changes; called with the new and the old state. */
export const onChoice = (listener) => listeners.add(listener);

window.addEventListener('popstate', () => {
  const before = now;
  now = read(location.hash);
  for (const listener of listeners) listener(now, before);
});
