// What the server says about its model; asked once, and again when the model view is opened.
import { signal } from "@preact/signals";
import { json } from "./api";

export interface ModelData {
  name: string;
  names: string[];
  version: string;
  context: number;
  layers: number;
  kv_type: string;
  exact: boolean;
  sampling: Record<string, number>;
  inspect: {
    path: string;
    architecture: string;
    name: string | null;
    size_bytes: number;
    parameters: number;
    tensor_count: number;
    tensor_types: Record<string, number>;
    metadata: Record<string, unknown>;
    use: any;
  };
  connect: { name: string; command: string }[];
  machine?: {
    memory: { total_bytes: number; available_bytes: number; process_bytes: number; weight_bytes: number; weight_budget: number; model_bytes: number; mapped: boolean; hot_bytes: number; hot_budget: number | null };
    disk: { total_bytes: number; free_bytes: number; warm_bytes: number; other_bytes: number; warm_quota: number; model_bytes: number; read_only: string };
    kernels: { backend: string; isa: string; why: string; cores: number; processor: string };
    settings: { name: string; value: string; source: string; help: string }[];
  };
}

export const model = signal<ModelData | null>(null);

export async function loadModel(): Promise<void> {
  model.value = await json<ModelData>("/v1/page/model");
}
