// Owns labels along the edges of a picture: how long they may be, when they stand aslant, which are left out so that none overlap.

/** The longest a label gets, in CSS pixels. */
export const longest = 132;

/** A label cut to fit, with a mark that it was. */
export function cut(context, text, room = longest) {
  if (context.measureText(text).width <= room) return text;
  const characters = [...text];
  while (characters.length > 1 && context.measureText(`${characters.join('')}…`).width > room) characters.pop();
  return `${characters.join('')}…`;
}

/** Every how many labels one is written, so that lines of `height` do not touch when cells are `cell` apart. */
export function every(cell, height) {
  if (cell >= height) return 1;
  const least = height / cell;
  return [2, 5, 10, 20, 50, 100, 200, 500, 1000].find((step) => step >= least) ?? 2000;
}

/** Whether all labels find room above their own columns. */
export const level = (context, labels, cell) => labels.every((label) => context.measureText(label).width <= cell - 5);
