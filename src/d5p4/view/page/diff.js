"use strict";
/* What one answer has that the best one has not, token by token. */
D5P4.diff = (() => {
  /**
   * Which entries of `own` are no part of a longest common subsequence with `other`.
   * Entries are strings; null (a mask) equals nothing and is never marked.
   */
  function differing(own, other) {
    const n = own.length;
    const m = other.length;
    const marks = new Array(n).fill(false);
    let start = 0;
    while (start < n && start < m && own[start] !== null && own[start] === other[start]) start += 1;
    let end = 0;
    while (end < n - start && end < m - start && own[n - 1 - end] !== null && own[n - 1 - end] === other[m - 1 - end]) {
      end += 1;
    }
    const rows = n - start - end;
    const columns = m - start - end;
    const width = columns + 1;
    const best = new Uint16Array((rows + 1) * width); // longest common part of what follows
    for (let i = rows - 1; i >= 0; i -= 1) {
      for (let j = columns - 1; j >= 0; j -= 1) {
        const equal = own[start + i] !== null && own[start + i] === other[start + j];
        best[i * width + j] = equal
          ? best[(i + 1) * width + j + 1] + 1
          : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
      }
    }
    for (let i = 0, j = 0; i < rows;) {
      const equal = j < columns && own[start + i] !== null && own[start + i] === other[start + j];
      if (equal && best[i * width + j] === best[(i + 1) * width + j + 1] + 1) {
        i += 1;
        j += 1;
      } else if (j < columns && best[i * width + j + 1] >= best[(i + 1) * width + j]) {
        j += 1;
      } else {
        marks[start + i] = own[start + i] !== null;
        i += 1;
      }
    }
    return marks;
  }

  return { differing };
})();
