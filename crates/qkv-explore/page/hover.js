// The hovered cell, shared by the panes so that two pictures mark the same cell. Not part of the URL.

const listeners = new Set();
let now = null;

/** The hovered cell, in tokens: { row, col, from } with either of them null, or null. */
export const pointed = () => now;

/** Sets the hovered cell, or null. */
export function point(cell) {
  if (cell?.row === now?.row && cell?.col === now?.col && cell?.from === now?.from) return;
  now = cell;
  for (const listener of listeners) listener(now);
}

/** Subscribes to changes. Returns a function that unsubscribes. */
export function onPoint(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}
