// Pictures are wider than the text column or a phone: a click shows one at its full size.
document.addEventListener("DOMContentLoaded", () => {
  for (const image of document.querySelectorAll("article img")) {
    if (image.closest("a")) continue;
    const link = document.createElement("a");
    link.href = image.src;
    link.title = "Enlarge";
    image.replaceWith(link);
    link.append(image);
  }
});
