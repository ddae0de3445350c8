// Announcements for screen readers: one polite live region.

import { place } from 'qkv/element';

let waiting;

/** Announces a sentence, debounced: of several in a row only the last is read. */
export function say(sentence) {
  clearTimeout(waiting);
  waiting = setTimeout(() => { place('say').textContent = sentence; }, 150);
}
