// The decorations of a map: numbers or tokens along its edges, the scale bar, and the overview map.

import { edge } from 'qkv/camera';
import { sized } from 'qkv/element';
import { cut } from 'qkv/label';
import { count } from 'qkv/number';
import { written } from 'qkv/run';
import { inks } from 'qkv/theme';
import { deepest, side } from 'qkv/tiles';

const readable = 13; // pixels per weight from which tokens are written
const round = Array.from({ length: 8 }, (_, zeros) => [1, 2, 5].map((lead) => lead * 10 ** zeros)).flat();

/** Whether the zoom allows tokens along the edges. */
export const near = (camera) => camera.pixels >= readable;

/** Numbers along the edges, or tokens if loaded: `tokens` is { rows, cols }, each [first, tokens…]. */
export function drawEdges(context, camera, tokens) {
  const ink = inks();
  context.font = `12px ${ink.font}`;
  context.textBaseline = 'middle';
  const close = near(camera);
  const apart = (room) => (close ? 1 : round.find((each) => each * camera.pixels >= room) ?? round.at(-1));
  const { rows, cols } = camera.sight;
  const label = (which, index) => {
    const [from, list] = tokens[which];
    const token = close ? list[index - from] : undefined;
    context.fillStyle = token ? (token.special ? ink.quiet : ink.text) : ink.quiet;
    return token ? written(token) : count(index);
  };
  const step = { rows: apart(34), cols: apart(64) };
  const first = (from, each) => Math.ceil(from / each) * each;
  const [left, top] = [Math.max(edge.left, camera.xOf(0)), Math.max(edge.top, camera.yOf(0))];
  context.textAlign = 'right';
  for (let row = first(rows[0], step.rows); row < rows[1]; row += step.rows) {
    const y = camera.yOf(row + (close ? 0.5 : 0));
    const text = label('rows', row);
    if (y >= edge.top) context.fillText(cut(context, text, edge.left - 12), left - 8, y);
  }
  for (let col = first(cols[0], step.cols); col < cols[1]; col += step.cols) {
    const x = camera.xOf(col + (close ? 0.5 : 0));
    const text = label('cols', col);
    if (x < edge.left) continue;
    context.save();
    context.translate(x, top - (close ? 5 : 13));
    context.textAlign = close ? 'left' : 'center';
    if (close) context.rotate(-Math.PI / 3);
    context.fillText(close ? cut(context, text, 42) : text, 0, 0);
    context.restore();
  }
}

/** A scale bar of a round number of tokens. */
export function drawScaleBar(context, camera) {
  const ink = inks();
  const long = round.findLast((each) => each * camera.pixels <= 110) ?? 1;
  const left = Math.max(edge.left, camera.xOf(0));
  const [x, y, width] = [left + 18, edge.top + camera.height - 16, long * camera.pixels];
  const text = `${count(long)} token${long === 1 ? '' : 's'}`;
  context.fillStyle = ink.paper;
  context.globalAlpha = 0.85;
  context.beginPath();
  context.roundRect(x - 10, y - 22, Math.max(width, context.measureText(text).width) + 20, 32, 7);
  context.fill();
  context.globalAlpha = 1;
  context.fillStyle = ink.text;
  context.textAlign = 'left';
  context.fillText(text, x, y - 10);
  context.fillRect(x, y, width, 2);
}

/** The overview with a frame around the visible part; hidden if everything is visible. */
export function drawMini(canvas, camera, image) {
  canvas.hidden = !image || camera.whole;
  if (canvas.hidden) return;
  const { n, m } = camera.layer;
  const size = 104;
  const all = Math.max(n, m);
  const piece = (side * all) / (2 ** deepest(camera.layer) * side);
  const context = sized(canvas, size, size);
  const ink = inks();
  context.fillStyle = ink.paper;
  context.fillRect(0, 0, size, size);
  context.drawImage(image, 0, 0, piece, piece, 0, 0, size, size);
  const share = size / all;
  const [width, height] = [Math.max(6, (camera.width / camera.pixels) * share), Math.max(6, (camera.height / camera.pixels) * share)];
  context.strokeStyle = ink.accent;
  context.lineWidth = 2;
  context.strokeRect(camera.col * share - width / 2, camera.row * share - height / 2, width, height);
}
