// A producer of trajectories: numbers its effects, and asks again under the same number until it
// has an answer, so that each effect happens once however often the connection breaks.

import { randomUUID } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';

import { DataPlaneService as calls } from './dataplane.mjs';
import { Code, RpcError } from './grpc.mjs';
import { fromValues, toValue } from './values.mjs';

const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 5_000;
const LEAST_TRY_MS = 1_000; // a try with less time left would only hide what went wrong before

/** Errors after which the same request may be asked again. */
const PASSING = new Set([Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED]);

export class Producer {
  #channel;
  #clientId;
  #tryMs;
  #budgetMs;
  #planeId = '';
  #last = 0n; // the number of the last effect
  #open = new Set(); // numbers of effects whose answer is not known
  #seen; // the latest revision that an answer spoke of

  /** `tryMs`: the deadline of one try. `budgetMs`: how long an effect is tried altogether. */
  constructor(channel, { clientId = randomUUID(), tryMs = 30_000, budgetMs = 120_000 } = {}) {
    this.#channel = channel;
    this.#clientId = clientId;
    this.#tryMs = tryMs;
    this.#budgetMs = budgetMs;
  }

  /** The plane, its limits, and who the caller is to it. Effects are of this plane from then on. */
  async describe() {
    const answer = await this.#ask(calls.Describe, () => ({}));
    this.#planeId = answer.plane_id;
    this.#see(answer.revision);
    return answer;
  }

  /** Opens an attempt at a group of `n` sessions and answers it. */
  async beginGroup(uid, partitionId, n) {
    const { attempt } = await this.#effect(calls.BeginGroup, { uid, partition_id: partitionId, n });
    return attempt;
  }

  /** Closes an attempt: its group is whole, and consumers are given it. */
  async endGroup(attempt, partitionId, status) {
    await this.#effect(calls.EndGroup, { attempt, partition_id: partitionId, status });
  }

  /**
   * Writes trajectories, all at one revision. Of each, in order, its key, and where it was refused
   * the reason and the partition that it went to instead.
   */
  async putTrajectories(trajectories, partitionId, { attempt = 0n } = {}) {
    const fields = { partition_id: partitionId, trajectories, attempt };
    const { results } = await this.#effect(calls.PutTrajectories, fields);
    return results;
  }

  /** Keys and tags of the rows that match, all as of one revision. */
  async list(partitionId, where) {
    const rows = [];
    let token = '';
    do {
      const answer = await this.#ask(calls.List, () => ({
        partition_id: partitionId,
        where: where && toValue(where),
        page_token: token,
      }));
      for (const row of answer.rows) {
        rows.push({ key: row.key, tags: fromValues(row.tags?.values ?? []), fields: row.fields });
      }
      this.#see(answer.revision);
      token = answer.next_page_token;
    } while (token);
    return rows;
  }

  /** One numbered effect. */
  async #effect(method, fields) {
    const number = ++this.#last;
    const seen = this.#seen;
    this.#open.add(number);
    const request = (isRetry) => ({
      ...fields,
      request: {
        client_id: this.#clientId,
        number,
        settled: this.#settled(),
        retry: isRetry,
        seen,
        plane_id: this.#planeId,
      },
    });
    try {
      const answer = await this.#ask(method, request);
      this.#open.delete(number);
      this.#see(answer.revision);
      return answer;
    } catch (error) {
      // Whether it happened is known, unless the tries ended in something that passes.
      if (!isPassing(error)) this.#open.delete(number);
      throw error;
    }
  }

  /** Asks until there is an answer, or an error that will not pass, or the time is up. */
  async #ask(method, request) {
    const end = Date.now() + this.#budgetMs;
    let pauseMs = FIRST_PAUSE_MS;
    let mayHaveArrived = false;
    for (;;) {
      const timeoutMs = Math.min(this.#tryMs, Math.max(1, end - Date.now()));
      try {
        return await this.#channel.unary(method, request(mayHaveArrived), { timeoutMs });
      } catch (error) {
        const waitMs = waitOf(error, pauseMs);
        if (waitMs === undefined || Date.now() + waitMs + LEAST_TRY_MS > end) throw error;
        mayHaveArrived ||= isPassing(error);
        await sleep(waitMs);
        pauseMs = Math.min(LONGEST_PAUSE_MS, 2 * pauseMs);
      }
    }
  }

  /** The number up to which every effect has its answer. */
  #settled() {
    let first = this.#last + 1n;
    for (const number of this.#open) if (number < first) first = number;
    return first - 1n;
  }

  #see(revision) {
    const seen = this.#seen;
    if (!revision) return;
    const isLater =
      !seen || revision.epoch > seen.epoch || (revision.epoch === seen.epoch && revision.n > seen.n);
    if (isLater) this.#seen = revision;
  }
}

function isPassing(error) {
  return error instanceof RpcError && PASSING.has(error.code);
}

/** How long to wait before the same request is asked again; undefined if that is of no use. */
function waitOf(error, pauseMs) {
  const afterS = error instanceof RpcError ? error.attributes.retry_after_s : undefined;
  if (afterS === undefined && !isPassing(error)) return undefined;
  return 1000 * afterS || pauseMs * (0.5 + Math.random());
}
