// BullMQ: a job id is the key, and finished jobs are kept, so that a second send under the id is dropped.
// `bullmq_side.mjs fill COUNT` queues empty jobs; `bullmq_side.mjs work AT_ONCE` works them off until it is killed.
import { Queue, Worker } from "bullmq";

const { hostname: host, port } = new URL(process.env.RIVAL_REDIS);
const connection = { host, port: Number(port), maxRetriesPerRequest: null };
const [command, number] = process.argv.slice(2);

if (command === "fill") {
  const queue = new Queue("rival", { connection });
  const CHUNK = 1000;
  for (let done = 0; done < Number(number); done += CHUNK) {
    const many = Array.from({ length: Math.min(CHUNK, Number(number) - done) }, (_, at) => ({
      name: "empty",
      data: null,
      opts: { jobId: `task-${done + at}`, attempts: 5, backoff: { type: "exponential", delay: 1000 } },
    }));
    await queue.addBulk(many);
  }
  await queue.close();
} else {
  const worker = new Worker("rival", async () => null, { connection, concurrency: Number(number) });
  // Without this, an error is reported and tried again for ever.
  worker.on("error", (error) => {
    console.error(error.message);
    process.exit(1);
  });
}
