// A public name that is the query without its spaces comes first: "memory pool" finds MemoryPool.
var Scorer = {
  score: ([document, title, anchor, description, score]) => {
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const name = title.toLowerCase().split(".").pop();
    return name === query.toLowerCase().replace(/[\s_]+/g, "") ? 100 : score;
  },
  // Sphinx's own.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
