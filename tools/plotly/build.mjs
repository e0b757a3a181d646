import { readFile } from "node:fs/promises";
import { build } from "esbuild";

const { dependencies } = JSON.parse(await readFile("package.json", "utf8"));
const license = await readFile("node_modules/plotly.js/LICENSE", "utf8");

// Explanations of settings for plotly's own reference: a third of the text, of which nothing is ever shown.
const EXPLANATION = /\b(?:description|_noTemplating_description):\s*(?:\[[^\]]*?\]\s*\.join\((?:'[^']*'|"[^"]*")\)|(?:'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"|`[^`$]*`)(?=\s*[,}]))\s*,?/g;
const withoutExplanations = {
  name: "without-explanations",
  setup({ onLoad }) {
    onLoad({ filter: /plotly\.js\/src\/.*\.js$/ }, async ({ path }) => ({
      contents: (await readFile(path, "utf8")).replace(EXPLANATION, ""),
      loader: "js",
    }));
  },
};

await build({
  entryPoints: ["entry.js"],
  outfile: "../../src/thresher_lab/report/plotly.js",
  bundle: true,
  minify: true,
  format: "iife",
  globalName: "Plotly",
  target: "es2020",
  define: { global: "window" },
  loader: { ".css": "empty" },
  plugins: [withoutExplanations],
  charset: "ascii",
  legalComments: "eof",
  banner: { js: `/*! plotly.js ${dependencies["plotly.js"]}: scatter, bar and heatmap.\n\n${license}*/` },
});
