// The color legend.

import { h, sized } from 'qkv/element';
import { plain } from 'qkv/number';
import { css } from 'qkv/palette';

const [width, height] = [180, 8];

const ends = {
  linear: ({ top }) => ['0', plain(top / 2), plain(top)],
  log: ({ top, floor }) => [`≤ ${plain(floor)}`, plain(Math.sqrt(floor * top)), plain(top)],
  rank: () => ['least', 'by rank', 'most'],
};

/** Draws the legend of a scale and a palette into `host`. */
export function legend(host, scale, palette) {
  let canvas = host.querySelector('canvas');
  if (!canvas) {
    canvas = h('canvas');
    host.replaceChildren(canvas, h('span'), h('span'), h('span'));
  }
  const context = sized(canvas, width, height);
  for (let x = 0; x < width; x++) {
    context.fillStyle = css(palette(x / (width - 1)));
    context.fillRect(x, 0, 1, height);
  }
  const words = ends[scale.kind](scale);
  host.querySelectorAll('span').forEach((span, i) => { span.textContent = words[i]; });
}
