"""FastAPI on Uvicorn: one process, and a thread of its pool for each image that is worked on."""

import os
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool

from benchmarks.work import Work

work = Work(Path(os.environ["SLIPWAY_RELEASE"]))
app = FastAPI()


@app.post("/classify")
async def classify(request: Request) -> dict[str, list[float]]:
    image = await request.body()
    return {"probabilities": (await run_in_threadpool(work.probabilities, image)).tolist()}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["SLIPWAY_PORT"]), log_level="warning")
