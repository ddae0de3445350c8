// Owns which cell is pointed at. Panes share it, so that two pictures side by side point at the same place. Not kept in the address.

const listeners = new Set();
let now = null;

/** The cell that is pointed at, as tokens: { row, col, from } with either of them null, or null. */
export const pointed = () => now;

/** Points at a cell, or with null at none. */
export function point(cell) {
  if (cell?.row === now?.row && cell?.col === now?.col && cell?.from === now?.from) return;
  now = cell;
  for (const listener of listeners) listener(now);
}

/** Calls back when another cell is pointed at. Returns how to stop. */
export function onPoint(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}
