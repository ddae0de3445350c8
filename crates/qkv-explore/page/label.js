// Labels along the edges of a picture: maximum length, slant, and which are skipped so that none overlap.

/** Maximum label width in CSS pixels. */
export const longest = 132;

/** Truncates a label with an ellipsis. */
export function cut(context, text, room = longest) {
  if (context.measureText(text).width <= room) return text;
  const characters = [...text];
  while (characters.length > 1 && context.measureText(`${characters.join('')}…`).width > room) characters.pop();
  return `${characters.join('')}…`;
}

/** The label interval at which lines of `height` do not touch for cells of size `cell`. */
export function every(cell, height) {
  if (cell >= height) return 1;
  const least = height / cell;
  return [2, 5, 10, 20, 50, 100, 200, 500, 1000].find((step) => step >= least) ?? 2000;
}

/** Whether all labels fit above their columns. */
export const level = (context, labels, cell) => labels.every((label) => context.measureText(label).width <= cell - 5);
