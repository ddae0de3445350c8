// Owns what is spoken: one polite live region, for those who do not see the picture.

import { place } from 'qkv/element';

let waiting;

/** Says a sentence once things have settled: of many in a row, only the last is heard. */
export function say(sentence) {
  clearTimeout(waiting);
  waiting = setTimeout(() => { place('say').textContent = sentence; }, 150);
}
