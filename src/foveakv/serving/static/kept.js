// Draws an image with the brightness of every patch set by the share of KV heads that store it.

const DARK = 0.08; // of a patch that no head stores

/** A root, so that small shares are visible. */
export const brightness = (share) => DARK + (1 - DARK) * Math.sqrt(share);

/** The share of an image's patches that is stored, on average. */
export const mean = (shares) => shares.reduce((sum, share) => sum + share, 0) / Math.max(shares.length, 1);

/** image: an HTMLImageElement. grid: [rows, columns], or null where the patches form no grid. */
export function draw(canvas, image, grid, shares) {
  const scale = Math.min(1, 640 / Math.max(image.naturalWidth, image.naturalHeight));
  canvas.width = Math.max(1, Math.round(image.naturalWidth * scale));
  canvas.height = Math.max(1, Math.round(image.naturalHeight * scale));
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  const [rows, columns] = grid ?? [1, 1];
  const values = grid ? shares : [mean(shares)];
  const edge = (part, parts, size) => Math.round((part * size) / parts);
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      const [left, top] = [edge(column, columns, canvas.width), edge(row, rows, canvas.height)];
      const [right, bottom] = [edge(column + 1, columns, canvas.width), edge(row + 1, rows, canvas.height)];
      context.fillStyle = `rgba(0, 0, 0, ${1 - brightness(values[row * columns + column])})`;
      context.fillRect(left, top, right - left, bottom - top);
    }
  }
}
