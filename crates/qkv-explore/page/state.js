// Owns what is chosen: one flat object, kept in the address after `#`, so that an address is a picture and the back button works.
// Who draws listens; who lets the user choose calls `set`. Nothing here knows views or the server.

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

/** Every choice: its value when the address is silent, and how it is read and written there. */
const choices = {
  // what is looked at
  model: [null, whole], text: [null, words], target: [null, words],
  model2: [null, whole], text2: [null, words],
  view: [null, words], layer: [null, whole], head: [null, head],
  cell: [null, numbers(whole)], step: [null, whole], depth: [null, whole],
  rows: [[], numbers(whole)], cols: [[], numbers(whole)], fold: ['mean', among('mean', 'sum')],
  shade: ['both', among('both', 'words')], followed: [false, flag],
  at: [null, numbers(fraction)], pool: ['max', among('max', 'mean')], sort: [null, words],
  // how it is shown
  scale: [null, among('linear', 'log', 'rank')], palette: ['sea', words], theme: ['auto', among('auto', 'light', 'dark')],
  words: [false, flag], special: [true, flag], sink: [true, flag], renormalise: [false, flag],
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

/** What is chosen now. */
export const chosen = () => now;

/** Changes some choices. `push` makes a step that the back button undoes; otherwise the current step is rewritten. */
export function choose(patch, { push = false } = {}) {
  const before = now;
  now = { ...now, ...patch };
  const address = write(now);
  try {
    if (address !== write(before)) history[push ? 'pushState' : 'replaceState'](null, '', address);
  } catch { /* a browser may forbid or ration this, for a file on disk say: the page works without */ }
  for (const listener of listeners) listener(now, before);
}

/** Calls back after each change, with the new choices and the old ones. */
export const onChoice = (listener) => listeners.add(listener);

window.addEventListener('popstate', () => {
  const before = now;
  now = read(location.hash);
  for (const listener of listeners) listener(now, before);
});
