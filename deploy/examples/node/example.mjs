// Writes groups of trajectories to a data plane from plain Node.js, and lists what became of them.
//
//   DATAPLANE_TOKEN_FILE=token.txt node deploy/examples/node/example.mjs \
//       --address grpcs://gateway:8443 --ca ca.pem --partition train --groups 2 --sessions 4
//
// The policy is a toy: its prompts are numbers, and its responses may be their sum.

import { randomUUID } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';

import { FinishReason, IdsSource } from './dataplane.mjs';
import { Channel, RpcError } from './grpc.mjs';
import { Producer } from './producer.mjs';
import { toValue, toValues } from './values.mjs';

const IGNORED = -100; // the label of a token that the policy did not generate
const PLUS = 10;
const END = 11;

const { values: options } = parseArgs({
  options: {
    address: { type: 'string', default: 'grpcs://localhost:8443' },
    ca: { type: 'string' },
    cert: { type: 'string' },
    key: { type: 'string' },
    partition: { type: 'string', default: 'train' },
    groups: { type: 'string', default: '2' },
    sessions: { type: 'string', default: '4' },
    step: { type: 'string', default: '0' },
    'budget-ms': { type: 'string', default: '120000' },
  },
});

/** The token of the environment, or of a file; never an argument, which everybody can read. */
function token() {
  const { DATAPLANE_TOKEN: given, DATAPLANE_TOKEN_FILE: path } = process.env;
  return given ?? readFileSync(path, 'utf8').trim();
}

/** One session: a prompt `a + b`, and an answer that is right two times of three. */
function trajectory(uid, sessionId, [a, b], step) {
  const prompt = [a, PLUS, b];
  const answer = a + b + (sessionId % 3 === 2 ? 1 : 0);
  const response = [...String(answer)].map(Number).concat(END);
  return {
    uid,
    session_id: sessionId,
    input_ids: [...prompt, ...response],
    labels: [...prompt.map(() => IGNORED), ...response],
    logprobs: [...prompt.map(() => 0), ...response.map(() => Math.log(0.5))],
    logprob_kind: 'raw',
    prompt_len: prompt.length,
    policy_spans: [{ version: step, start: 0, end: response.length }],
    reward: answer === a + b ? 1 : 0,
    finish_reason: FinishReason.STOP,
    num_turns: 1,
    global_steps: step,
    task_name: 'sum',
    ids_source: IdsSource.ENGINE,
    messages: toValue([
      { role: 'user', content: `${a}+${b}` },
      { role: 'assistant', content: String(answer) },
    ]),
    tags: { values: toValues({ producer: 'node' }) },
  };
}

async function produce(producer, partition, sessions, step) {
  const uid = `node-${randomUUID()}`;
  const numbers = [0, 1].map(() => Math.floor(10 * Math.random()));
  const attempt = await producer.beginGroup(uid, partition, sessions);
  const trajectories = Array.from({ length: sessions }, (_, i) => trajectory(uid, i, numbers, step));
  const results = await producer.putTrajectories(trajectories, partition, { attempt });
  for (const { key, quarantine, reason } of results) {
    if (reason) console.error(`${key} was refused (${quarantine || 'not kept'}): ${reason}`);
  }
  await producer.endGroup(attempt, partition, 'finished');
  return uid;
}

async function main() {
  const read = (path) => path && readFileSync(path);
  const hasToken = process.env.DATAPLANE_TOKEN || process.env.DATAPLANE_TOKEN_FILE;
  const channel = new Channel(options.address, {
    ca: read(options.ca),
    cert: read(options.cert),
    key: read(options.key),
    token: hasToken ? token : undefined,
  });
  const producer = new Producer(channel, { budgetMs: Number(options['budget-ms']) });
  try {
    const plane = await producer.describe();
    console.log(`plane ${plane.plane_id}, as ${plane.principal || 'anyone'}`);
    const uids = [];
    for (let i = 0; i < Number(options.groups); i += 1) {
      const { partition, sessions, step } = options;
      uids.push(await produce(producer, partition, Number(sessions), BigInt(step)));
    }
    const where = { uid: { in: uids }, session_id: { exists: true } };
    const rows = await producer.list(options.partition, where);
    for (const { key, tags } of rows) {
      console.log(`${key}  ${tags.status}  ${tags.seq_len} tokens  score ${tags.score}`);
    }
    console.log(`${rows.length} trajectories of ${uids.length} groups`);
  } finally {
    channel.close();
  }
}

main().catch((error) => {
  console.error(error instanceof RpcError ? error.message : error);
  process.exitCode = 1;
});
