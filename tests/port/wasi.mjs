// Runs a WebAssembly program of the WASI kind in Node 18.17 or later: node --no-warnings
// tests/port/wasi.mjs PROGRAM [ARGUMENT...]
import { readFile } from 'node:fs/promises';
import { WASI } from 'node:wasi';

const wasi = new WASI({ version: 'preview1', args: process.argv.slice(2), returnOnExit: true });
const imports = wasi.getImportObject?.() ?? { wasi_snapshot_preview1: wasi.wasiImport };
const { instance } = await WebAssembly.instantiate(await readFile(process.argv[2]), imports);
process.exitCode = wasi.start(instance);
