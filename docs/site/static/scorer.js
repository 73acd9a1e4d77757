// How the search ranks its results: Sphinx's own numbers, but guides come before reference, and decisions last.
// A query such as batch_norm or optim.lr names a setting.
const namesSetting = /\w[._]\w/.test(new URLSearchParams(location.search).get("q") || "");
var Scorer = {
  score: ([page, , , , score]) => {
    if (namesSetting && page.startsWith("reference/settings")) return score + 30;
    if (page.startsWith("adr/") || page === "changelog" || page === "results") return score - 100;
    return page.startsWith("reference/") ? score - 10 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
