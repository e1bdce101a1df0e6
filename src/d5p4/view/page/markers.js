"use strict";
/* Markers that never hide each other: answers that fall together share one, the others move apart. */
D5P4.markers = (() => {
  const { side } = D5P4.dom;
  const HEIGHT = 16;
  const TOGETHER = 3; // so near, in pixels, two points are one
  const GAP = 3;
  const REACH = 72; // as far as a marker moves
  const WAYS = ways(4);

  /** Moves [dx, dy] to try, the shortest first. */
  function ways(grid) {
    const found = [];
    for (let dx = -REACH; dx <= REACH; dx += grid) for (let dy = -REACH; dy <= REACH; dy += grid) found.push([dx, dy]);
    return found.sort((one, other) => Math.hypot(...one) - Math.hypot(...other));
  }

  /** Numbers of answers from 1 on, as "1 2 5" or "1–4 7". */
  function label(ranks) {
    const found = [];
    for (let i = 0; i < ranks.length; ) {
      let j = i;
      while (ranks[j + 1] === ranks[j] + 1) j += 1;
      if (j - i >= 2) found.push(`${ranks[i] + 1}–${ranks[j] + 1}`);
      else for (let n = i; n <= j; n += 1) found.push(ranks[n] + 1);
      i = j + 1;
    }
    return found.join(" ");
  }

  const font = (colours) => `bold 10px ${colours.font}`;

  /** Markers {run, right, points, label, x, y (where they belong), px, py (where they are), width} inside `area`. */
  function arrange(context, points, area, colours) {
    const found = [];
    for (const point of points) {
      const mate = found.find(
        (one) =>
          one.run === point.run &&
          one.right === point.right &&
          Math.hypot(one.x - point.px, one.y - point.py) <= TOGETHER,
      );
      if (mate) mate.points.push(point);
      else found.push({ run: point.run, right: point.right, points: [point], x: point.px, y: point.py });
    }
    context.font = font(colours);
    found.forEach((marker, i) => {
      marker.label = label(marker.points.map((point) => point.rank));
      marker.width = Math.max(HEIGHT, context.measureText(marker.label).width + 8);
      const [dx, dy] = WAYS.find((way) => free(marker, way, found.slice(0, i), area)) || [0, 0];
      [marker.px, marker.py] = [marker.x + dx, marker.y + dy];
    });
    return found;
  }

  /** Whether a marker moved this way lies in the area and on none of the others. */
  function free(marker, [dx, dy], others, area) {
    const [x, y] = [marker.x + dx, marker.y + dy];
    const inside =
      x - marker.width / 2 >= area.left &&
      x + marker.width / 2 <= area.right &&
      y - HEIGHT / 2 >= area.top &&
      y + HEIGHT / 2 <= area.bottom;
    return inside && !others.some((other) => near(other, x, y, (other.width + marker.width) / 2 + GAP, HEIGHT + GAP));
  }

  const near = (marker, x, y, wide, high) => Math.abs(marker.px - x) < wide && Math.abs(marker.py - y) < high;

  /** The marker at a place, or undefined. */
  const at = (markers, x, y) => markers.find((marker) => near(marker, x, y, marker.width / 2 + 3, HEIGHT / 2 + 3));

  /** Each run has its own colour, and round or square markers in turn. Wrong answers are hollow. */
  function draw(context, markers, colours) {
    for (const marker of markers) tie(context, marker, colours);
    for (const marker of markers) {
      const colour = colours[side(marker.run)];
      const hollow = marker.right === false;
      context.beginPath();
      const round = marker.run % 2 ? 1 : HEIGHT / 2;
      context.roundRect(marker.px - marker.width / 2, marker.py - HEIGHT / 2, marker.width, HEIGHT, round);
      context.lineWidth = 2;
      context.strokeStyle = colour;
      context.fillStyle = hollow ? colours.surface : colour;
      context.fill();
      context.stroke();
      context.fillStyle = hollow ? colour : colours.surface;
      context.font = font(colours);
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(marker.label, marker.px, marker.py + 0.5);
    }
  }

  /** A thin line from where a marker belongs to where it had to go. */
  function tie(context, marker, colours) {
    if (marker.x === marker.px && marker.y === marker.py) return;
    context.strokeStyle = colours[side(marker.run)];
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(marker.x, marker.y);
    context.lineTo(marker.px, marker.py);
    context.stroke();
  }

  return { arrange, draw, at };
})();
